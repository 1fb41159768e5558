"""The program around a module, such as an engine, to which a part of it may lead: a configuration, or its parent."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import nn

from varlen_graphs.shadows.snapshot import Snapshot


def leading_to(modules: Collection[nn.Module], named: Mapping[str, nn.Module], snapshot: Snapshot) -> set[str]:
    """Return the paths of the attributes of parts that lead, through objects and containers, to modules.

    Args:
        modules: Modules that are no parts.
        named: The parts by path.
        snapshot: What the parts hold.
    """
    parts = {id(vars(part)): path for path, part in named.items()}
    holders: dict[int, list[tuple[int, Any]]] = {}
    for one in snapshot.holders if modules else ():
        for key, value in one.entries.items():
            for at in _ids(value):
                holders.setdefault(at, []).append((id(one.own), key))
    found, seen, todo = set[str](), set[int](), [id(vars(module)) for module in modules]
    while todo:
        for at, key in holders.get(todo.pop(), ()):
            if at in parts:
                found.add(f"{parts[at]}.{key}" if parts[at] else str(key))
            elif at not in seen:
                seen.add(at)
                todo.append(at)
    return found


def _ids(value: Any) -> Iterator[int]:
    """Yield the identities under which a snapshot may have what a value holds."""
    yield id(value)
    if issubclass(type(value), tuple):
        for one in tuple.__iter__(value):
            yield from _ids(one)
    with suppress(AttributeError):
        yield id(object.__getattribute__(value, "__dict__"))
