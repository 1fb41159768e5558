"""Snapshots of containers, objects and closures, compared with what they hold later."""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from numbers import Number
from types import CellType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
VALUES = (Number, str, bytes, frozenset, range, slice)
"""Classes whose objects are alike if they are equal."""

ABSENT = object()


class Place(NamedTuple):
    """Place at which a module registers a parameter, buffer or submodule.

    Found by the module's own attributes, because a registry may be replaced: `ModuleList.pop` builds a new one.
    """

    owner: dict[str, Any]  # attributes of the module
    registry: str
    name: str


class Changed(NamedTuple):
    """A change of something that a module, or a shadow of it, keeps.

    Attributes:
        path: Path from the module.
        place: Path of the attribute, or of the container of the entry, that changed.
        own: The tensor that was written, or the container, object or closure cell with another entry.
        key: Key of the entry.
        before: The entry, or the tensor of the original, as it was.
        kind: The class whose attribute it is; `None` for an entry of a container.
        added: True if there was no such entry.
    """

    path: str
    place: str
    own: Any
    key: Any
    before: Any
    kind: type | None = None
    added: bool = False

    @property
    def now(self) -> Any:
        """The present entry, or the tensor."""
        return self.own if isinstance(self.own, Tensor) else entries_of(self.own).get(self.key)

    def set(self, value: Any) -> None:
        """Write another value there; sets are left as they are."""
        if isinstance(self.own, Tensor):
            self.own.copy_(value)
        elif type(self.own) is CellType:
            self.own.cell_contents = value
        elif isinstance(self.own, dict | list | deque | array | bytearray):
            self.own[self.key] = value
        elif not isinstance(self.own, set):
            object.__setattr__(self.own, self.key, value)


class Holder(NamedTuple):
    """A container, attributes of an object of some kind, an object with slots, or a closure cell, and its entries."""

    path: str
    own: Any
    entries: dict[Any, Any]
    kind: type | None

    def is_same(self) -> bool:
        """Return True if a dict holds the same objects in the same order; False where that has to be looked at."""
        own, entries = self.own, self.entries
        if not isinstance(own, dict) or dict.__len__(own) != len(entries):
            return False
        values = [*map(id, dict.values(own))]
        return values == [*map(id, entries.values())] and [*dict.keys(own)] == [*entries]


class Snapshot:
    """Entries of containers, objects and closures as they were, to be compared with those of later."""

    def __init__(self) -> None:
        self._holders: list[Holder] = []
        self._empty: list[Holder] = []  # most are: a module has nine kinds of hooks

    def add(self, path: str, own: Any, kind: type | None = None) -> None:
        """Add the entries of now."""
        if type(own) in (dict, OrderedDict, list, set) and not own:
            self._empty.append(Holder(path, own, {}, kind))
        else:
            self._holders.append(Holder(path, own, entries_of(own), kind))

    @property
    def holders(self) -> list[Holder]:
        """Containers, objects and cells, with their entries."""
        return [*self._holders, *self._empty]

    def take(self, own: Any, entries: Mapping[Any, Any]) -> None:
        """Take these entries for those that a container or object had."""
        for holder in self._holders:
            if holder.own is own:
                holder.entries.update(entries)

    def now(self) -> dict[tuple[int, Any], tuple[str, Any]]:
        """Return the place and present value of each entry that is another one now, by what holds it, and its key."""
        return {(id(one.own), one.key): (one.place, one.now) for one in self.changes()}

    def changes(self) -> Iterator[Changed]:
        """Yield each entry that is another one now."""
        holders = [one for one in self._holders if not one.is_same()]
        if any(map(len, [one.own for one in self._empty])):
            holders += [one for one in self._empty if one.own]
        for path, own, before, kind in holders:
            now, start = entries_of(own), f"{path}." if path else ""
            for key in now.keys() | before.keys():
                if not alike(now.get(key, ABSENT), before.get(key, ABSENT)):
                    name = (f"{start}{key}" if key else path) if type(key) is str else f"{path}[{told(key)}]"
                    place = path if kind is None else name
                    yield Changed(name, place, own, key, before.get(key), kind, key not in before)


def slots_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the slots of an object that are set."""
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and (one := getattr(value, name, ABSENT)) is not ABSENT:
                yield name, one


def entries_of(own: Any) -> dict[Any, Any]:
    """Return what a container, object or cell holds now, by key or index, whatever subclasses make of that."""
    if isinstance(own, dict):
        return dict(dict.items(own))
    if type(own) is CellType:
        with suppress(ValueError):  # empty
            return {"": own.cell_contents}
        return {}
    if isinstance(own, Tensor):
        return {"": own.numpy().tobytes()}
    if isinstance(own, set):
        return dict.fromkeys(set.__iter__(own), True)
    kinds: tuple[Any, ...] = (list, deque, array, bytearray)
    for kind in kinds:
        if isinstance(own, kind):
            return dict(enumerate(kind.__iter__(own)))
    return dict(slots_of(own))


def alike(one: Any, other: Any) -> bool:
    """Return True if values are the same object, equal numbers, texts or ranges, tuples of such, or one method."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if issubclass(kind, tuple) and kind not in ATOMS:
        return tuple.__len__(one) == tuple.__len__(other) and all(
            map(alike, tuple.__iter__(one), tuple.__iter__(other))
        )
    if kind is MethodType:
        return one.__self__ is other.__self__ and one.__func__ is other.__func__
    if kind is partial:
        keys = one.keywords.keys() == other.keywords.keys()
        return keys and alike(
            (one.func, *one.args, *one.keywords.values()), (other.func, *other.args, *other.keywords.values())
        )
    if kind not in ATOMS and not issubclass(kind, VALUES):
        return False
    try:
        return bool(one == other or (one != one and other != other))
    except Exception:  # of a class of one's own
        return False


def told(value: Any) -> str:
    """Return a value for messages: others than numbers and texts may raise where they are asked for theirs."""
    return repr(value) if type(value) in ATOMS - {bytes} else f"a {type(value).__name__}"
