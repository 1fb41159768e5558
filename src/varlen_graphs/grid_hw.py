"""Items on the host that are plain grids: slices of images, say."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from varlen_graphs.budgets import Budget
from varlen_graphs.errors import LayoutError
from varlen_graphs.layout import Column, LayoutArgument, as_list, is_integers, positive


@dataclass(frozen=True)
class GridHW(LayoutArgument):
    """The argument that describes items as `(h, w)`: images, or the slices that large ones are cut into, in patches.

    The module sees it, where it takes that argument, as int64 `[items, 2]` with `(0, 0)` for items of padding.

    Attributes:
        name: The argument. A call may bring a list of pairs, or a tensor `[items, 2]` on the CPU, or on the GPU, which
            costs one copy to the host unless the smallest budget holds whatever it may say.
        columns: Extra integers an item carries.
    """

    name: str = "tgt_sizes"
    columns: tuple[Column, ...] = ()

    def parse(self, value: Any) -> list[tuple[int, int, int]]:
        """Check `value` and return its items as `(1, h, w)`.

        Raises:
            LayoutError: Not `[items, 2]` integers, no items, or a size below 1.
        """
        items = []
        for index, entry in enumerate(as_list(self.name, value, "[items, 2] of (h, w)")):
            what, pair = f"{self.name}[{index}]", entry.tolist() if isinstance(entry, Tensor) else entry
            if not isinstance(pair, Sequence) or len(pair) != 2:
                raise LayoutError(f"{what} is {entry!r}: expected two integers (h, w)")
            h, w = (positive(what, side, entry) for side in pair)
            items.append((1, h, w))
        return items

    def argument(self, values: Tensor, budget: Budget) -> Tensor:
        """What the module gets of the values of an item table: int64 `[items, 2]`."""
        return values[:, 1:3]

    def is_table(self, value: Any) -> bool:
        """Whether `value` is a tensor of integers `[items, 2]`."""
        return is_integers(value, 2) and bool(value.shape[1] == 2)

    def write(self, value: Tensor, values: Tensor) -> None:
        """Write such a tensor into as many rows of an item table. No sync where both are on one device."""
        values[:, 0].fill_(1)
        values[:, 1:3].copy_(value)
