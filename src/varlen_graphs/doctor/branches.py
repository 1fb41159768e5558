"""Loops and branches around a line, told from its source."""

import ast
import linecache
from collections.abc import Iterator, Set

from varlen_graphs.watch.lines import Line

_CONTROL = (
    ast.For, ast.While, ast.If, ast.IfExp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Match,
)  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def deciding_line(line: Line, steady: Set[int]) -> Line | None:
    """Where the loop or branch begins that decides whether a line runs, and how often; `None` if none shows.

    Args:
        line: Of any file.
        steady: Numbers of lines of the same file over which nothing decided: the answer holds none of them, and is the
            outermost of which this is true.
    """
    for node in _around(line):
        first = node.body[0].lineno if isinstance(node, ast.For | ast.While | ast.If) else node.lineno
        if not any(first <= number <= (node.end_lineno or first) for number in steady):
            return line._replace(number=node.lineno)
    return None


def _around(line: Line) -> list[ast.stmt | ast.expr]:
    """Loops and branches around a line in its function, the outermost first."""
    try:
        node: ast.AST | None = ast.parse("".join(linecache.getlines(line.file)))
    except SyntaxError:  # no file of Python: a cell of a notebook, with magic
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
