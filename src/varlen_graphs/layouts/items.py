"""Items on the host: small integers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Literal

from varlen_graphs.errors import counted

Order = Literal["raster", "merge_block"]
"""Order of the rows of a frame: line by line, or merge block by merge block."""


@dataclass(frozen=True)
class Layout:
    """The items of one call, known to the host.

    Attributes:
        items: One tuple an item: `(t, h, w, *columns)`, in rows before any merging.
        length: Length to which each item is padded, in a padded batch; 0 for packed rows.
        grouped: If True, adjoining items may belong together: the last number of an item is 1 if it begins a group,
            and 0 if it belongs to the group of the item before.
        rows: Rows of each item, `t * h * w`.
        total: Rows of all items.
        longest: Rows of the largest item.
    """

    items: tuple[tuple[int, ...], ...]
    length: int = 0
    grouped: bool = False

    rows: tuple[int, ...] = field(init=False, repr=False, compare=False)
    total: int = field(init=False, repr=False, compare=False)
    longest: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = []
        for item in self.items:  # a loop, because a comprehension costs a call of its own
            rows.append(item[0] * item[1] * item[2])  # noqa: PERF401
        vars(self).update(rows=tuple(rows), total=sum(rows), longest=max(rows, default=0))

    def of(self, items: Iterable[tuple[int, ...]], length: int | None = None) -> "Layout":
        """Return other items in the same arrangement, padded to another length if there is one."""
        return Layout(tuple(items), self.length if length is None else length, self.grouped)

    def told(self, index: int) -> str:
        """Return an item for messages: its rows alone, where no item has other sizes."""
        return counted(self.rows[index], "row") if self._has_rows_alone else str(self.items[index])

    @cached_property
    def _has_rows_alone(self) -> bool:
        return all(len(item) == 3 and item[:2] == (1, 1) for item in self.items)

    @property
    def size(self) -> int:
        """Rows of the call, those that pad a batch included."""
        return self.length * len(self.items) or self.total

    @cached_property
    def group_of(self) -> Sequence[int]:
        """The group of each item; without groups each item is one."""
        if not self.grouped:
            return range(len(self.items))
        return [begun - 1 for begun in accumulate(item[-1] for item in self.items)]

    @cached_property
    def groups(self) -> list[range]:
        """The items of each group, by their indices."""
        firsts = [i for i, group in enumerate(self.group_of) if i == 0 or group != self.group_of[i - 1]]
        return [range(first, end) for first, end in zip(firsts, [*firsts[1:], len(self.items)], strict=True)]

    @cached_property
    def group_rows(self) -> list[int]:
        """Rows of each group."""
        return [sum(self.rows[group.start : group.stop]) for group in self.groups]

    def __len__(self) -> int:
        return len(self.items)
