"""The argument that holds the rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.errors import SpecError
from varlen_graphs.spec.normalize import Normalize


@dataclass(frozen=True)
class PackedRows:
    """The argument that holds the rows: packed, `[rows, *shape]`, or with a padded layout `[batch, length, *shape]`.

    Attributes:
        name: The argument.
        shape: The shape of one row, which is that of the argument without the rows; `None` takes it from the first
            call.
        dtype: The dtype the module sees. `None`: that of its first floating parameter (or the default dtype); floating
            rows of another dtype are cast. An integer dtype must be declared, and rows must come in it.
        pad: What padding rows of an integer dtype hold; it must be valid for the module (a token id, say). Floating
            padding may hold anything. In a padded batch rows past the end of an item hold it, floating ones too.
        rows_dim: In which dimension of the argument packed rows lie, if not the first: 1 for `[1, rows, dim]`, or
            `[mel_bins, frames]`. The module gets it contiguous: that takes no copy where all dimensions before the rows
            have one entry, and one inside the graph elsewhere.
        normalize: What makes of integer rows, such as the bytes of pixels, what the module takes: it gets them in the
            dtype of its first floating parameter. Needs an integer `dtype`, and `shape`.
        padded_by: The argument by which a call marks its real rows, where it brings a padded batch
            `[batch, length, *shape]` and the module is to get the rows packed: a mask `[batch, length]` of bool or of 0
            and 1, each item padded on the right, which must agree with the layout. The batch is packed on its way in,
            one launch, and outputs declared as `Rows()` come back as `[batch, length, ...]`, two launches each, with
            zeros past the end of each item. The host has to know the items; mask and layout on the GPU cost a copy to
            the host each.

    Raises:
        SpecError: `shape` is no shape, `dtype` no dtype, `rows_dim` no dimension of such an argument, or rows that
            cannot be normalised.
    """

    name: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    pad: int = 0
    rows_dim: int = 0
    normalize: Normalize | None = None
    padded_by: str | None = None

    def __post_init__(self) -> None:
        if self.shape is not None:
            if not isinstance(self.shape, Sequence) or not all(isinstance(size, Integral) for size in self.shape):
                raise SpecError(f"{self!r}: expected shape to be that of one row, such as (1176,), or None")
            object.__setattr__(self, "shape", tuple(self.shape))
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise SpecError(f"{self!r}: expected dtype to be a torch.dtype, such as torch.int64, or None")
        if self.normalize is not None:
            self.normalize.check(self.shape)
            if self.dtype is None or self.dtype.is_floating_point:
                raise SpecError(f"{self!r}: expected an integer dtype of rows to normalise, such as torch.uint8")
        most = math.inf if self.shape is None else len(self.shape)
        if not 0 <= self.rows_dim <= most:
            raise SpecError(f"{self!r}: expected rows_dim to be at least 0, and at most the dimensions of shape")

    @classmethod
    def pixels(cls, name: str, width: int, normalize: Normalize | None) -> "PackedRows":
        """Rows of so many pixels: floats, or bytes that are normalised."""
        return cls(name, (width,), None if normalize is None else torch.uint8, normalize=normalize)

    def rows_first(self, argument: Tensor) -> Tensor:
        """A view of the argument as rows are kept, `[rows, *shape]`."""
        return argument if self.rows_dim == 0 else argument.movedim(self.rows_dim, 0)

    def as_argument(self, rows: Tensor) -> Tensor:
        """A view of rows that are kept so, as the argument."""
        return rows if self.rows_dim == 0 else rows.movedim(0, self.rows_dim)

    def argument_shape(self, rows: Sequence[Any], shape: Sequence[Any]) -> list[Any]:
        """The shape of the argument: with these sizes for its rows, or their names for a message."""
        return [*shape[: self.rows_dim], *rows, *shape[self.rows_dim :]]

    def describe(self, dims: Sequence[str], shape: Sequence[int] | None) -> str:
        """The shape that the argument should have, for messages; `dims` is what its rows lie in."""
        sizes = [*["any size"] * self.rows_dim, "any shape"] if shape is None else shape
        return f"[{', '.join(map(str, self.argument_shape(dims, sizes)))}]"
