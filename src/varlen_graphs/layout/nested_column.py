"""Adjoining items that belong together, such as the frames of a clip when these differ in size."""

from dataclasses import dataclass
from typing import Any

from varlen_graphs.errors import LayoutError
from varlen_graphs.layout.columns import Column
from varlen_graphs.layout.values import as_list


@dataclass(frozen=True)
class NestedColumn(Column):
    """A column whose nesting tells the groups: the items of one inner list belong together.

    `[[-1], [-1], [2, 6, 9]]` are five items in three groups. An integer beside inner lists is a group of its own, so
    `[-1, -1, [2, 6, 9]]` says the same. In a flat list or tensor `[items]`, and where the argument is left out, every
    item is one.

    Items of a group are never parted by the packer, so a group that no budget holds runs eager as a whole. Segments may
    be groups (`per="group"`), and outputs have entries for them (`Groups`). The host has to see the nesting, so items
    that are described on the GPU cost one copy to the host.

    Attributes:
        name: The argument.
        pad: As of `Column`.
        function: As of `Column`; what it gives may be nested.
        default: As of `Column`.
    """

    groups = True

    def parse(self, value: Any, items: int) -> list[int]:
        """Check the values that a call brought and return them, one an item.

        Raises:
            LayoutError: Not one int64 for each item, or a group without items.
        """
        flat = None if value is None else [entry for group in self._groups(value) for entry in group]
        return super().parse(flat, items)

    def begins(self, value: Any, items: int) -> list[int]:
        """Of values that `parse` takes, whether each item begins a group (1), or belongs to the one before (0)."""
        if value is None:
            return super().begins(value, items)
        return [int(at == 0) for group in self._groups(value) for at in range(len(group))]

    def _groups(self, value: Any) -> list[list[Any]]:
        groups = []
        for index, entry in enumerate(as_list(self.name, value, "one for each item, or a list of them for each group")):
            plain = entry.tolist() if hasattr(entry, "tolist") else entry
            groups.append([*plain] if isinstance(plain, list | tuple) else [plain])
            if not groups[-1]:
                raise LayoutError(f"{self.name}[{index}] is empty: expected at least one item in every group; drop it")
        return groups
