"""Comparison of what a module holds beside tensors: its forward may read that, and no replay does."""

import re
from array import array
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from inspect import getattr_static
from types import CellType
from typing import Any

from torch import Tensor, nn

from varlen_graphs.guards.adapters import ADAPTERS, is_adapted
from varlen_graphs.guards.slots import CONTAINERS, Entries
from varlen_graphs.shadows.shadow import address_of
from varlen_graphs.shadows.snapshot import ABSENT, Changed, Holder, Snapshot, entries_of, told

ELSEWHERE = ("training", "forward", "gradient_checkpointing", "grad_checkpointing")
"""Attributes of parts that are checked otherwise, and some without effect outside of training."""

PRIVATE = re.compile(r"(^|\.)_")
"""Matches the path from a part to what is not compared."""

CHUNK = 64
"""Number of entries of a container that one sample compares."""

SIZES = [kind.__len__ for kind in CONTAINERS]


class HeldEntries:
    """Entries of attributes, lists, dicts, sets and objects of a module, to be compared with those at capture.

    All but attributes that were `None`, as caches begin, and what names that begin with an underscore lead to from a
    part. Of tensors those that graphs read, in lists and objects with slots; others have a `Slot`.

    Args:
        named: The parts of the module by path.
        beside: Names of what runs beside it on the host at each call.
        snapshot: What the module kept at the first capture.
        moving: Paths of what runs change, and that changes no output; more may be added.
        read: Addresses of the memory that graphs read.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Module],
        beside: Collection[str],
        snapshot: Snapshot,
        moving: AbstractSet[str],
        read: Collection[int],
    ) -> None:
        self._parts = {id(vars(part)): vars(part) for part in named.values()}
        self._snapshot, self._moving, self._read = snapshot, moving, read
        holders = snapshot.holders
        # Code may read on the host, at each call, what it holds; adapters are part of the key of graphs.
        code = {one.path for one in holders if type(one.own) is CellType}
        adapters = {_join(path, name) for path, part in named.items() if is_adapted(part) for name in ADAPTERS}
        aside = {*beside, *code, *adapters}
        self._holders = {
            id(one.own): one
            for one in holders
            if _is_usual(one.own) and (one.path not in named or id(one.own) in self._parts)
            if aside.isdisjoint(_prefixes(one.path)) and not _is_private(one.path, named)
        }

    def chunks(self) -> list[Entries]:
        """Return what samples compare, in chunks: all but arrays, and the forward of each part."""
        found: dict[int, Entries] = {at: (own, ["forward"]) for at, own in self._parts.items()}
        more: list[Entries] = []
        for at, holder in self._holders.items():
            is_array = isinstance(holder.own, Tensor | array | bytearray)
            if not is_array and self._moving.isdisjoint(_prefixes(holder.path)):
                _, keys = found.setdefault(at, (holder.own, []))
                keys += [key for key, value in entries_of(holder.own).items() if self._compares(holder, key, value)]
                more += [(holder.own, keys[start : start + CHUNK]) for start in range(CHUNK, len(keys), CHUNK)]
                del keys[CHUNK:]
        return [*found.values(), *more]

    def changes(self) -> Iterator[str]:
        """Describe each change."""
        for change in self._snapshot.changes():
            holder = self._holders.get(id(change.own))
            if holder is not None and self._moving.isdisjoint(_prefixes(change.place)):
                before = self._before(change)
                if before is not ABSENT and self._compares(holder, change.key, before):
                    is_other = isinstance(before, Tensor)
                    how = "is another tensor" if is_other else f"changed from {told(before)} to {told(change.now)}"
                    yield f"{change.path!r} {how}"

    def _compares(self, holder: Holder, key: Any, value: Any) -> bool:
        if type(key) is str and key.startswith("_"):
            return False
        if issubclass(type(value), Tensor):
            return not isinstance(holder.own, dict) and address_of(value) in self._read
        if holder.kind is None:  # where `None` is what an entry that is added was
            return True
        of_part = id(holder.own) in self._parts
        return value is not None and not (of_part and key in ELSEWHERE) and _join(holder.path, key) not in self._moving

    @staticmethod
    def _before(change: Changed) -> Any:
        """Return what an entry was; for an attribute that there was not, what its class has."""
        if change.added and change.kind is not None:
            return getattr_static(change.kind, change.key, ABSENT)
        return change.before


def _join(path: str, name: str) -> str:
    """Return the path of an attribute of the part at a path."""
    return f"{path}.{name}" if path else name


def _is_usual(own: Any) -> bool:
    """Return True for what is no code, nor a container whose class makes up its size."""
    return type(own).__len__ in SIZES if isinstance(own, CONTAINERS) else type(own) is not CellType


def _prefixes(path: str) -> set[str]:
    """Return the paths of what holds an object, and its own."""
    return {path, *(path[: end.start()] for end in re.finditer(r"[.\[]", path))}


def _is_private(path: str, named: Mapping[str, nn.Module]) -> bool:
    """Return True if a name that begins with an underscore leads from a part to what it holds at a path."""
    part = max((one for one in _prefixes(path) if one in named), key=len, default="")
    return PRIVATE.search(path[len(part) :].lstrip(".")) is not None
