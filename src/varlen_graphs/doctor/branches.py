"""Loops and branches around a line, found in its source."""

import ast
import linecache
from collections.abc import Iterator, Set

from varlen_graphs.watch.lines import Line

_CONTROL = (
    ast.For, ast.While, ast.If, ast.IfExp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Match,
)  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def deciding_line(line: Line, steady: Set[int]) -> Line | None:
    """Return the first line of the outermost loop or branch around a line with no `steady` line in its body.

    Steady lines, of the same file, always ran equally often: this loop or branch decides how often the line runs.
    """
    for node in _around(line):
        first = node.body[0].lineno if isinstance(node, ast.For | ast.While | ast.If) else node.lineno
        if not any(first <= number <= (node.end_lineno or first) for number in steady):
            return line._replace(number=node.lineno)
    return None


def _around(line: Line) -> list[ast.stmt | ast.expr]:
    """Return the loops and branches around a line within its function, outermost first."""
    try:
        node: ast.AST | None = ast.parse("".join(linecache.getlines(line.file)))
    except SyntaxError:  # not plain Python, such as a notebook cell with magic commands
        return []
    around: list[ast.stmt | ast.expr] = []
    while node is not None:
        if isinstance(node, _FUNCTIONS):
            around.clear()
        elif isinstance(node, _CONTROL):
            around.append(node)
        node = next(_children_at(node, line.number), None)
    return around


def _children_at(node: ast.AST, number: int) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        first, last = getattr(child, "lineno", None), getattr(child, "end_lineno", None)
        if first is not None and last is not None and first <= number <= last:
            yield child
