"""Argument that holds the rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.checks.fields import check_fields, check_pad, is_integer
from varlen_graphs.errors import SpecError
from varlen_graphs.inputs.normalize import Normalize
from varlen_graphs.inputs.patches import Patches


@dataclass(frozen=True)
class Rows:
    """Argument that holds the rows: packed, `[rows, *shape]`, or with a padded layout `[batch, length, *shape]`.

    Attributes:
        name: Name of the argument.
        shape: Shape of one row, that is, of the argument without the rows; `None` takes it from the first call.
        dtype: Dtype in which the module receives the rows; floating rows of another dtype are cast. `None` for that of
            its first floating matrix (or the default dtype): declare it where matrices of several dtypes come, as a
            table in bfloat16 beside layers in float32. An integer dtype must be declared, and calls must bring rows of
            this dtype.
        pad: Value of padding rows of an integer dtype, which must be valid for the module (a token id, for example).
            Floating padding holds zeros, but in the check and in `encoder.verify`, which try other numbers there. In a
            padded batch, and beside masks of dense attention, it holds `pad`.
        rows_dim: Dimension of packed rows in the argument: 1 for `[1, rows, dim]` or `[mel_bins, frames]`. The module
            receives the argument contiguous, which takes a copy inside the graph unless all dimensions before the rows
            have size 1.
        normalize: Normalisation of integer rows, such as bytes of pixels, or `Patches` of whole images. The module
            receives the result in the dtype of its first floating matrix. Requires an integer `dtype`, and
            `shape`.
        padded_by: Mask argument of calls that bring a padded batch `[batch, length, *shape]` to a module that takes
            packed rows: `[batch, length]` of bool or of 0 and 1, each item padded on the right, in agreement with the
            layout. The graph packs the batch, or one launch ahead of it if it is not contiguous or of another dtype,
            and outputs declared as `Rows()` are returned as `[batch, length, ...]` with zeros past the end of each
            item, two launches each. The host must know the items; a mask and a layout on the GPU cost one copy to the
            host each.

    Raises:
        SpecError: `shape`, `dtype`, `pad` or `rows_dim` is invalid, or `normalize` does not apply to such rows.
    """

    name: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    pad: bool | float = 0
    rows_dim: int = 0
    strip: bool = False
    normalize: Normalize | Patches | None = None
    padded_by: str | None = None

    def __post_init__(self) -> None:
        if self.shape is not None:
            if not isinstance(self.shape, tuple | list) or not all(map(_is_size, self.shape)):
                raise SpecError(f"{self!r}: expected shape to be that of one row, such as (1176,), or None")
            object.__setattr__(self, "shape", tuple(map(int, self.shape)))
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise SpecError(f"{self!r}: expected dtype to be a torch.dtype, such as torch.int64, or None")
        check_fields(self)
        if self.dtype is not None:
            check_pad(self, self.dtype)
        if self.normalize is not None:
            self.normalize.check(self.shape)
            if self.dtype is None or self.dtype.is_floating_point:
                raise SpecError(f"{self!r}: expected an integer dtype for rows to normalise, such as torch.uint8")
        most = math.inf if self.shape is None else len(self.shape)
        if not 0 <= self.rows_dim <= most:
            raise SpecError(f"{self!r}: expected rows_dim to be at least 0, and at most the dimensions of shape")
        if self.strip and (not self.rows_dim or self.shape is None or [*self.shape, 0][self.rows_dim] < 1):
            raise SpecError(f"{self!r}: expected rows_dim and shape, with the width of a row in shape[rows_dim]")

    @classmethod
    def pixels(cls, name: str, width: int, normalize: Normalize | Patches | None) -> "Rows":
        """Return the declaration for rows of `width` pixels: floating, or bytes if `normalize` is given."""
        if isinstance(normalize, Patches):
            if normalize.width != width:
                raise SpecError(f"{normalize} makes patches of {normalize.width} values, but the tower takes {width}")
            return cls(name, normalize.row_shape, torch.uint8, normalize=normalize)
        return cls.pictures(name, (width,), normalize)

    @classmethod
    def pictures(cls, name: str, shape: Sequence[int] | None, normalize: Normalize | None) -> "Rows":
        """Return the declaration for rows of this shape, channels first: floating, or bytes if `normalize` is given."""
        return cls(
            name,
            None if shape is None else tuple(shape),
            None if normalize is None else torch.uint8,
            normalize=normalize,
        )

    def rows_first(self, argument: Tensor) -> Tensor:
        """Return a view of the argument with the rows first, `[rows, *shape]`."""
        if self.strip and self.shape:
            argument = argument.unflatten(self.rows_dim, (-1, self.shape[self.rows_dim]))
        return argument if self.rows_dim == 0 else argument.movedim(self.rows_dim, 0)

    def as_argument(self, rows: Tensor) -> Tensor:
        """Return rows `[rows, *shape]` with the dimensions of the argument: a view, except for a strip."""
        argument = rows if self.rows_dim == 0 else rows.movedim(0, self.rows_dim)
        return argument.flatten(self.rows_dim, self.rows_dim + 1) if self.strip else argument

    def argument_shape(self, rows: Sequence[Any], shape: Sequence[Any]) -> list[Any]:
        """Return the shape of the argument for these sizes, or names, of its rows."""
        first, rest = shape[: self.rows_dim], shape[self.rows_dim :]
        if self.strip:
            count, width = rows[0], rest[0]
            rows, rest = [count * width if is_integer(count) else f"{count} * {width}"], rest[1:]
        return [*first, *rows, *rest]

    def describe(self, dims: Sequence[str], shape: Sequence[int] | None) -> str:
        """Format the expected shape of the argument for an error message; `dims` names the dimensions of its rows."""
        sizes = [*["any size"] * self.rows_dim, "any shape"] if shape is None else shape
        return f"[{', '.join(map(str, self.argument_shape(dims, sizes)))}]"


def _is_size(value: Any) -> bool:
    return is_integer(value) and value >= 0
