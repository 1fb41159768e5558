"""Private parts of other packages: docs/private-torch.md has each that the library uses, and no other."""

import ast
import re
from pathlib import Path

import torch

import varlen_graphs as vg

PACKAGE = Path(vg.__file__).parent
PAGE = PACKAGE.parent.parent / "docs" / "private-torch.md"
NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}  # public, as Python's documentation says


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name != "_"


def innermost(names):
    """Return the last private one of some names; `None` if all are public."""
    return next(filter(is_private, reversed(names)), None)


def chain(node):
    """Return the names of an attribute of an attribute of ..., the first one `None` if it is no plain name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else None, *names]


def own_names(tree):
    """Yield the names that a file of the package defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and chain(node)[0] == "self":
            yield node.attr


def foreign_names(tree):
    """Yield the dotted names that a file takes from other objects and packages."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name.split(".") for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ([*str(node.module).split("."), one.name] for one in node.names)
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            names = chain(node)
            yield names[2:] if names[0] in ("self", "cls") else [str(names[0]), *names[1:]]


def test_the_page_has_all_private_parts_that_are_used_and_no_other():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")]
    own = {name for tree in trees for name in own_names(tree)} | NAMED_TUPLE | {"_C"}  # which has nothing but others
    own -= {*dir(torch.nn.Module())}
    foreign = [names for tree in trees for names in foreign_names(tree)]
    used = {innermost(names) for names in foreign if not {"varlen_graphs", "aten", "ops"} & {*names}} - {None}
    rows = re.findall(r"^\| (`.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    listed = {innermost(name.split(".")) for row in rows for name in re.findall(r"`(.*?)`", row)}
    assert used - own - listed == set(), "used, but not on the page: use a public way, or tell why there is none"
    assert listed - used == set(), "on the page, but not used any more"
