"""Batches of items of one size, which no argument describes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.checks.fields import check_fields, is_integer
from varlen_graphs.errors import LayoutError, SpecError
from varlen_graphs.layouts.arguments import LayoutArgument
from varlen_graphs.layouts.columns import Column


@dataclass(frozen=True)
class Batch(LayoutArgument):
    """Items of one size: the rows are a batch `[batch, ...]`, and nothing else describes them.

    Each item counts as one row of any shape, such as `[channels, height, width]`. Budgets are batch sizes, such as
    `[1, 2, 4, 8]`; a larger batch takes several replays. Where `vg.inputs.Rows(shape=...)` is not declared, items of
    each shape (resolution) get graphs and static inputs of their own, which count as a set of static arguments does.

    Attributes:
        columns: Extra integers that each item carries.
        usual: Shape of one item for which `encoder.capture()` captures before the first call; calls may bring others.
    """

    columns: tuple[Column, ...] = ()
    usual: tuple[int, ...] | None = None
    name: ClassVar[str] = "the batch"  # type: ignore[misc]  # for messages; no argument can have this name
    has_argument = False
    one_row = True
    rows_are = "a batch of items of one size"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        if self.usual is not None and not all(is_integer(size) and size >= 0 for size in self.usual):
            raise SpecError(f"usual={self.usual!r}: expected the shape of one item, such as (3, 224, 224), or None")

    def parse(self, value: Sequence[Any]) -> list[tuple[int, int, int]]:
        """Return as many items of one row as `value` has entries.

        Raises:
            LayoutError: There are none.
        """
        if not len(value):
            raise LayoutError(
                "the batch is empty: expected at least one item; skip the call when there is nothing to encode"
            )
        return [(1, 1, 1)] * len(value)

    def argument(self, values: Tensor, budget: Budget) -> Tensor:
        """Never called: there is no argument."""
        raise NotImplementedError
