"""Sites of the corpus: statements that a CUDA graph cannot hold, or that put a number or a choice of the layout into it.

A site is named by its function and a part of its statement, because line numbers move. Of a loop or branch the site is
the head; `with_body` takes in what it runs.
"""

import ast
import importlib
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

MARK = "# site"
CONSEQUENCE = "# consequence"


class Site(NamedTuple):
    """A statement of a function: `function` is qualified by its class, `file` the name of its Python module.

    A file that is `None` is that of the tower's own class. With its body, a statement is named by how it begins.
    """

    function: str
    statement: str
    file: str | None = None
    with_body: bool = False


class Place(NamedTuple):
    """Lines of a file, first and last."""

    file: str
    first: int
    last: int

    def holds(self, file: str, number: int) -> bool:
        """Return True if a line lies here."""
        return file == self.file and self.first <= number <= self.last


def sites(function: str, *statements: str, file: str | None = None, with_body: bool = False) -> tuple[Site, ...]:
    """Return sites of one function."""
    return tuple(Site(function, statement, file, with_body) for statement in statements)


def place_of(site: Site, own_file: str) -> Place:
    """Find the lines of a site.

    Raises:
        ValueError: There is no such statement, or there are several.
    """
    path, tree = _parsed(site.file or own_file)
    statements = [node for node in ast.walk(_function(tree, site.function)) if isinstance(node, ast.stmt)][1:]
    found = [
        (node.lineno, last) for node in statements for last in [_last_line(node)] if _part_of(site, path, node, last)
    ]
    if len(found) != 1:
        raise ValueError(f"{len(found)} statements of {path}, {site.function} hold {site.statement!r}: expected one")
    first, last = found[0]
    if site.with_body:
        (node,) = [node for node in statements if (node.lineno, _last_line(node)) == found[0]]
        last = node.end_lineno or last
    return Place(path, first, last)


def marked(made: type, mark: str) -> list[Place]:
    """Return the statements of a class on whose first line the comment `mark` stands; modules of a table have none."""
    path, tree = _parsed(made.__module__)
    lines = _lines(path)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == made.__name__]
    statements = [own for node in classes for own in ast.walk(node) if isinstance(own, ast.stmt)]
    return [Place(path, own.lineno, _last_line(own)) for own in statements if mark in lines[_last_line(own) - 1]]


def _part_of(site: Site, path: str, node: ast.stmt, last: int) -> bool:
    wanted = re.sub(r"\s", "", site.statement)
    if site.with_body:
        return re.sub(r"\s", "", "".join(_lines(path)[node.lineno - 1 : node.end_lineno])).startswith(wanted)
    return wanted in re.sub(r"\s", "", "".join(_lines(path)[node.lineno - 1 : last]))


def _last_line(node: ast.stmt) -> int:
    """Return the last line of a statement, of a compound one the last line of its head."""
    if isinstance(node, ast.Match):
        return node.subject.end_lineno or node.lineno
    body = getattr(node, "body", None)
    if isinstance(body, list) and body:
        return max(node.lineno, body[0].lineno - 1)
    return node.end_lineno or node.lineno


def _function(tree: ast.Module, name: str) -> ast.AST:
    node: ast.AST = tree
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef)
        inner = [own for own in ast.iter_child_nodes(node) if isinstance(own, kinds) and own.name == part]
        if not inner:
            raise ValueError(f"there is no {name}")
        node = inner[-1]
    return node


@cache
def _parsed(file: str) -> tuple[str, ast.Module]:
    path = importlib.import_module(file).__file__ or ""
    return path, ast.parse("".join(_lines(path)))


@cache
def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
