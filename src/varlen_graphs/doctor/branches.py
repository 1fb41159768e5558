"""Loops and branches around a line, found in its source."""

import ast
import linecache
from collections.abc import Iterator, Set
from functools import lru_cache
from textwrap import shorten

from varlen_graphs.torch_dispatch.lines import Line

_STATEMENTS = (ast.For, ast.While, ast.If, ast.Match)
_EXPRESSIONS = (ast.IfExp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

Control = ast.stmt | ast.expr


def controls_around(line: Line) -> list[Control]:
    """Return the loops and branches around a line within its function, outermost first."""
    return _around(_tree(line.file), line.number)[0]


def deciding_control(line: Line, steady: Set[int]) -> Control | None:
    """Return the outermost loop or branch around a line with no `steady` line in its body.

    Steady lines, of the same file, always ran equally often: this loop or branch decides how often the line runs. An
    expression may share its lines with steady code, and decides if no statement does.
    """
    around = controls_around(line)
    for node in around:
        first = node.body[0].lineno if isinstance(node, ast.For | ast.While | ast.If) else node.lineno
        if not any(first <= number <= (node.end_lineno or first) for number in steady):
            return node
    return around[-1] if around and isinstance(around[-1], _EXPRESSIONS) else None


def is_turn(line: Line) -> bool:
    """Return True if a loop, and nothing in it, decides how often a line runs."""
    around = controls_around(line)
    return bool(around) and isinstance(around[-1], ast.For | ast.While) and around[-1].lineno != line.number


def exit_before(line: Line) -> Line:
    """Return the line of the last branch before a line that leaves its function or loop; the line itself if none."""
    first = function_around(line)
    exits = [
        node.lineno
        for node in ast.walk(_tree(line.file))
        if isinstance(node, ast.If) and first <= node.lineno and (node.end_lineno or node.lineno) < line.number
        if any(isinstance(own, ast.Return | ast.Continue | ast.Break | ast.Raise) for own in node.body + node.orelse)
    ]
    return line._replace(number=max(exits, default=line.number))


def return_line(line: Line) -> Line:
    """Return the line of the first return in the function that begins at a line, or of the branch it is in."""
    inside = next((own for own in ast.walk(_tree(line.file)) if getattr(own, "lineno", 0) == line.number), None)
    returns = [own.lineno for own in ast.walk(inside) if isinstance(own, ast.Return)] if inside else []
    if not returns:
        return line
    first = line._replace(number=min(returns))
    around = controls_around(first)
    return first._replace(number=around[0].lineno) if around else first


def statement(line: Line) -> str:
    """Return the whole statement at a line, or the head of a loop or branch, in one line."""
    first, last = statement_lines(line)
    text = " ".join(linecache.getline(line.file, number).strip() for number in range(first, last + 1))
    return shorten(text, 240, placeholder=" ...") if text else line.source


def statement_lines(line: Line) -> tuple[int, int]:
    """Return the first and last line of the statement at a line, or of the head of a loop or branch."""
    first = last = line.number
    node = next(_children_at(_tree(line.file), line.number), None)
    while isinstance(node, ast.stmt):
        body = getattr(node, "body", None)
        head = body[0].lineno - 1 if isinstance(body, list) else node.end_lineno or line.number
        head = max(head, node.lineno)  # the body may begin on the same line
        first, last = (node.lineno, head) if node.lineno <= line.number <= head else (first, last)
        node = next(_children_at(node, line.number), None)
    return first, max(first, last)


def function_around(line: Line) -> int:
    """Return the number of the first line of the innermost function around a line; 0 if there is none."""
    node, first = _tree(line.file), 0
    while (inner := next(_children_at(node, line.number), None)) is not None:
        node, first = inner, inner.lineno if isinstance(inner, _FUNCTIONS) else first
    return first


def _tree(file: str) -> ast.AST:
    """Return the syntax tree of a file; empty if it is not plain Python, such as a cell with magic commands."""
    return _parse("".join(linecache.getlines(file)))


@lru_cache(maxsize=64)
def _parse(source: str) -> ast.AST:
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.Module([], [])


def _around(node: ast.AST, number: int) -> tuple[list[Control], bool]:
    """Return the loops and branches around a line within its function, outermost first, and whether `node` is in it.

    Several expressions may share the line; the one with most loops and branches counts.
    """
    inner = [_around(child, number) for child in _children_at(node, number)]
    around, ends = max(inner, key=lambda found: len(found[0]), default=([], False))
    if not ends and isinstance(node, _STATEMENTS + _EXPRESSIONS):
        around = [node, *around]
    return around, ends or isinstance(node, _FUNCTIONS)


def _children_at(node: ast.AST, number: int) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        first, last = getattr(child, "lineno", None), getattr(child, "end_lineno", None)
        if first is not None and last is not None and first <= number <= last:
            yield child
