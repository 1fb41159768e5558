"""Base class of buffers, and tensors of the module that they read."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from varlen_graphs.errors import SpecError
from varlen_graphs.layouts.item_table import ItemTable


class Buffer(ABC):
    """Argument of the module that is computed from the item table by operations inside the graph.

    Attributes:
        name: Argument to fill.
        any_segments: If True, the buffer may use segments of any kind (`table.cu_seqlens(...)`,
            `table.budget.segments`), so all kinds count against budgets; windows count only if a buffer of this library
            declares them. Buffers of this library set it to False and declare the kind that they use, if any, as `per`.
        for_rows: Rows that the buffer supports: `"packed"`, `"padded"`, or `None` for both.
        clears_padding: True for masks and biases of dense attention, which multiplies padding rows by 0, so that they
            must not be NaN: floating padding of packed rows, and of tensors beside them, then holds `pad`.
        largest: Largest size of an item for which the buffer has entries; `None` for no limit.
    """

    name: str
    any_segments: bool = True
    for_rows: ClassVar[Literal["packed", "padded"] | None] = None
    clears_padding: ClassVar[bool] = False
    largest: int | None = None

    def size(self, item: Sequence[int]) -> int:
        """Return the size of an item `(t, h, w, *columns)` that is limited by `largest`; never more than its rows."""
        return 0

    @abstractmethod
    def produce(self, table: ItemTable, module: nn.Module) -> Any:
        """Compute the buffer at the capacity of `table.budget`, with tensor operations only and without host syncs."""


TensorSource = str | Tensor
"""Tensor, or dotted path of a tensor in the module, which is resolved anew at each forward."""

_MISSING = object()


def resolve_tensor(source: TensorSource, module: nn.Module) -> Tensor:
    """Return the tensor of `module` that `source` refers to."""
    if isinstance(source, Tensor):
        return source
    found: object = module
    for part in source.split("."):
        found = getattr(found, part, _MISSING)
    if isinstance(found, Tensor):
        return found
    what = "does not exist" if found is _MISSING else f"is a {type(found).__name__}"
    raise SpecError(
        f"{source!r} {what} in {type(module).__name__}: expected the dotted path of a parameter or buffer, for example "
        "'pos_embed.weight'"
    )
