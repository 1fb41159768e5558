"""Tensors that a call brings beside its rows: an entry a row, an entry an item, or one shape in all calls."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.checks.fields import check_at_least, check_fields, check_pad, is_integer
from varlen_graphs.checks.values import is_dense, quoted
from varlen_graphs.errors import InputError, SpecError
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.outputs.entries import Extent, Items, Whole, filled


@dataclass(frozen=True)
class Input(ABC):
    """Base class of tensors that a call brings beside its rows. They are copied with the rows of each replay.

    Attributes:
        name: Name of the argument.
        shape: Shape of one entry.
        dtype: Dtype in which the module receives the tensor; floating ones of another dtype are cast. `None` for that
            of its first floating matrix, to which float32, float64 and numbers are not cast if it has fewer bits than
            32. Other dtypes than floating ones must be declared, and calls must bring them.
        default: Value of all entries in calls that do not bring the argument; `None`: calls must bring it.

    Raises:
        SpecError: A field has a value of another kind, or `dtype` cannot hold `default` or `pad`.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    default: bool | float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not all(is_integer(size) and size >= 0 for size in self.shape):
            raise SpecError(f"{self!r}: expected shape to be that of one entry, such as (768,), or () for a number")
        for name in ("pad", "default"):
            if self.dtype is not None and getattr(self, name) is not None:
                check_pad(self, self.dtype, name)

    @property
    def pad(self) -> bool | float:
        """Value of padding entries."""
        return 0

    @property
    def rows_dim(self) -> int:
        """Dimension of the entries in the argument."""
        return 0

    @abstractmethod
    def extent(self, rows: Extent) -> Extent:
        """Return the extent of the tensor, where that of the rows is given."""

    @abstractmethod
    def prepare(self, tensor: Tensor, table: ItemTable, clears: bool) -> Tensor:
        """Return what the module gets, from the entries at the capacity of `table.budget`. Part of the graph.

        If `clears`, floating padding of packed rows holds the pad, too.
        """

    def copied(
        self, tensor: Tensor | None, entries: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a copy of what a call brought, or its default, for a run of so many entries without padding."""
        if tensor is not None:
            return tensor.to(device, dtype, copy=True)
        assert self.default is not None  # noqa: S101 - else the call would have been refused
        return torch.full((*entries, *self.shape), self.default, dtype=dtype, device=device)

    def entries_first(self, argument: Tensor) -> Tensor:
        """Return a view of the argument with its entries first, `[entries, *shape]`."""
        return argument

    def as_argument(self, entries: Tensor) -> Tensor:
        """Return a view of entries `[entries, *shape]` with the dimensions of the argument."""
        return entries

    def read(self, value: Any, rows: Extent) -> Tensor:
        """Return the value that a call brought as a tensor with its entries first; `rows` is the extent of its rows.

        Raises:
            InputError: It is no dense tensor of such entries, and no list or number that makes one.
        """
        tensor, dims = self.as_tensor(value), self.extent(rows).dims
        first, end = self.rows_dim, self.rows_dim + len(dims)
        if tensor.dim() < end or (*tensor.shape[:first], *tensor.shape[end:]) != self.shape:
            expected = ", ".join(map(str, [*self.shape[:first], *dims, *self.shape[first:]]))
            raise InputError(f"{self.name} is {list(tensor.shape)}: expected [{expected}], as declared by {self!r}")
        return self.entries_first(tensor)

    def as_tensor(self, value: Any) -> Tensor:
        """Return a value that a call brought as a tensor; numbers become those of the declared kind, without loss.

        Raises:
            InputError: It is no dense tensor, and no list or number that makes one.
        """
        if isinstance(value, Tensor):
            if not is_dense(value):
                raise InputError(f"{self.name} is a sparse, nested or meta tensor: expected a dense one")
            return value
        try:
            made = torch.as_tensor(value, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"{self.name} is {quoted(value)} ({quoted(str(error))}): expected a tensor, or numbers that make one"
            ) from None
        if (self.dtype is None or self.dtype.is_floating_point) and not made.is_complex():
            return torch.as_tensor(value, dtype=torch.float64, device="cpu")  # cast as the dtype of the module demands
        if self.dtype is not None and made.dtype == torch.int64 and not hasattr(value, "dtype"):
            own = made.to(self.dtype)  # Python's integers have no dtype of their own
            return own if own.tolist() == made.tolist() else made
        return made


@dataclass(frozen=True)
class PerRow(Input):
    """Tensor with an entry for every row, beside the rows: token types, positions that the caller knows, a mask.

    It comes and is handed on like the rows: packed `[rows, *shape]`, or `[batch, length, *shape]` where rows are a
    padded batch (which is packed with them, if they are).

    Attributes:
        pad: Value of padding rows, which must be valid for the module. In the check, and in `encoder.verify`, floating
            padding of packed rows holds anything.
        rows_dim: Dimension of packed rows in the argument: 1 for `[3, rows]`.
    """

    pad: bool | float = 0
    rows_dim: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "rows_dim")
        if self.rows_dim > len(self.shape):
            raise SpecError(f"{self!r}: expected rows_dim to be at most the dimensions of shape")

    def extent(self, rows: Extent) -> Extent:
        """Return the extent of the rows."""
        return rows

    def entries_first(self, argument: Tensor) -> Tensor:
        """Return a view of the argument with the rows first, `[rows, *shape]`."""
        return argument.movedim(self.rows_dim, 0) if self.rows_dim else argument

    def as_argument(self, entries: Tensor) -> Tensor:
        """Return a view of rows `[rows, *shape]` with the dimensions of the argument."""
        return entries.movedim(0, self.rows_dim) if self.rows_dim else entries

    def prepare(self, tensor: Tensor, table: ItemTable, clears: bool) -> Tensor:
        """Return `[rows, *shape]` or `[batch, length, *shape]`, with `pad` past the rows."""
        if table.layout.padded:
            return filled(tensor, ~table.real_rows, self.pad)
        if clears or not tensor.is_floating_point():
            tensor = filled(tensor, ~table.row_active, self.pad)
        return self.as_argument(tensor).contiguous()


@dataclass(frozen=True)
class PerItem(Input):
    """Tensor with an entry for every item: timesteps, guidance, the id of an aspect ratio, an embedding, a mask.

    Calls bring `[items, *shape]`, or numbers, on the host or the device. Entries travel with their items where a call
    is split or its items are assigned to ranks.

    Attributes:
        pad: Value of padding items, which must be valid for the module. In the check, and in `encoder.verify`, floating
            padding holds anything.
        per_row: If True, the module receives the entry of its item for each packed row, `[rows, *shape]`.
    """

    pad: bool | float = 0
    per_row: bool = False

    def extent(self, rows: Extent) -> Extent:
        """Return one entry an item."""
        return Items()

    def prepare(self, tensor: Tensor, table: ItemTable, clears: bool) -> Tensor:
        """Return `[items, *shape]` at the budget's capacity, or `[rows, *shape]`."""
        if clears or not tensor.is_floating_point():
            tensor = filled(tensor, table.item_rows == 0, self.pad)
        return tensor[table.row_item] if self.per_row else tensor


@dataclass(frozen=True)
class PerCall(Input):
    """Tensor of one shape in all calls: an embedding of a prompt, a scale. A number may come for a shape of `()`.

    All replays of a call read the same. A value that only few calls change is a static argument instead.
    """

    def extent(self, rows: Extent) -> Extent:
        """Return the extent of a tensor without entries."""
        return Whole()

    def prepare(self, tensor: Tensor, table: ItemTable, clears: bool) -> Tensor:
        """Return the tensor."""
        return tensor
