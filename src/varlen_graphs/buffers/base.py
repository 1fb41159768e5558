"""What every declared buffer is: an argument of the module that the graph computes for itself."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from varlen_graphs.errors import SpecError
from varlen_graphs.layout.item_table import ItemTable


class Buffer(ABC):
    """An argument of the module, produced from the item table by operations that are part of the graph.

    Attributes:
        name: The argument it fills.
        any_segments: Whether it may use segments of every kind (`table.cu_seqlens(...)`, `table.budget.segments`), so
            that all kinds count against budgets; windows only where a buffer of this library has declared them. Those
            say exactly which they use, if any.
        for_rows: What rows it is for: packed ones, or those of a padded batch; `None` where it does not matter.
        largest: The largest size of an item that it has entries for; `None`: any.
    """

    name: str
    any_segments: bool = True
    for_rows: ClassVar[Literal["packed", "padded"] | None] = None
    largest: int | None = None

    def size(self, item: Sequence[int]) -> int:
        """The size of an item `(t, h, w, *columns)` that may not be larger than `largest`: at most its rows."""
        return 0

    @abstractmethod
    def produce(self, table: ItemTable, module: nn.Module) -> Any:
        """Compute the buffer at the capacity of `table.budget`. Only tensor operations, and no host sync."""


TensorSource = str | Tensor
"""A tensor of the module by its dotted path, followed anew at each forward, or a tensor itself."""


_MISSING = object()


def resolve_tensor(source: TensorSource, module: nn.Module) -> Tensor:
    """The tensor that `source` means in `module`.

    Raises:
        SpecError: The path leads to no tensor.
    """
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


def check_largest(buffer: Buffer, largest: int) -> None:
    """Whether a buffer can have entries up to this size.

    Raises:
        SpecError: It is below 1.
    """
    if largest < 1:
        raise SpecError(f"{buffer!r}: expected largest to be at least 1")
