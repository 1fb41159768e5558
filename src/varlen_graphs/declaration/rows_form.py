"""The form in which calls bring the rows."""

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from varlen_graphs.inputs.rows import Rows
from varlen_graphs.layouts.pictures import patches_of, pictures_of


class RowsForm:
    """Rows as calls bring them: packed, `[rows, *shape]`, or a batch, `[batch, length, *shape]`.

    Args:
        rows: The declaration of the argument with the rows.
        dims: Names of the dimensions before those of one row, for messages.

    Attributes:
        dims: As given.
        by_item: True if these count items, each of which is one entry.
        padded_dims: Number of dimensions in which items to pack are padded.
    """

    padded_dims = 1

    def __init__(self, rows: Rows, dims: tuple[str, ...]) -> None:
        self.dims = dims
        self.by_item = dims[0] != "rows" and len(dims) == 1
        self._rows = rows
        self._first, self._end = rows.rows_dim, rows.rows_dim + len(dims)

    def __str__(self) -> str:
        return self._rows.describe(self.dims, self._rows.shape)

    def accepts(self, shape: Sequence[int]) -> bool:
        """Return True if a call's rows may have this shape."""
        row, first = self._rows.shape, self._first
        if row is not None and self._rows.strip:
            width = row[first]
            whole = len(shape) == len(row) and not shape[first] % width
            return whole and (*shape[:first], width, *shape[first + 1 :]) == row
        return len(shape) >= self._end and (row is None or (*shape[:first], *shape[self._end :]) == row)

    def other_row(self, shape: Sequence[int]) -> str:
        """Describe rows that are arranged as declared, but have another shape; empty if that is not what is wrong."""
        row = self._rows.shape
        if row is None or len(shape) != len(row) + len(self.dims):
            return ""
        if not Counter(row) - Counter(shape):  # all sizes are there, in another order
            return ""
        return (
            f"; each row is {[*shape[: self._first], *shape[self._end :]]}, not {list(row)}: they are made for another "
            "module, or vg.inputs.Rows(shape=...) declares another shape"
        )

    def row_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of one row, from that of a call's rows, rows first."""
        return tuple(shape[len(self.dims) :])

    def row_dims(self, count: int) -> list[int]:
        """Return the dimensions of a call's rows, of so many, along which the entries of one row lie."""
        return [dim for dim in range(count) if not self._first <= dim < self._end]

    def batch(self, rows: Tensor) -> Tensor:
        """Return a call's rows to pack as `[batch, *padded, *shape]`, with `padded_dims`. A view."""
        return rows

    def of_batch(self, batch: Tensor) -> Tensor:
        """Return such a batch in the form of a call's rows."""
        return batch


class PicturesForm(RowsForm):
    """Padded pictures, `[images, channels, height, width]`, whose rows are patches.

    Args:
        rows: The declaration of the argument with the pictures, whose shape is that of a patch.
    """

    padded_dims = 2

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows, ("images",))
        assert rows.shape is not None  # noqa: S101 - the declaration is checked for it
        self._channels, self._patch, _ = self._row = rows.shape

    def __str__(self) -> str:
        return f"[images, {self._channels}, height, width] with sides of at least {self._patch}"

    def accepts(self, shape: Sequence[int]) -> bool:
        """Return True if a call's rows may have this shape."""
        return len(shape) == 4 and shape[1] == self._channels and min(shape[2:]) >= self._patch

    def other_row(self, shape: Sequence[int]) -> str:
        """Return an empty text: the form of pictures says it all."""
        return ""

    def row_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of one patch."""
        return self._row

    def row_dims(self, count: int) -> list[int]:
        """Return the dimension of channels: along others, pixels would change their patch."""
        return [1]

    def batch(self, rows: Tensor) -> Tensor:
        """Return the patches of pictures, `[images, height, width, *shape]`. A view."""
        return patches_of(rows, self._patch)

    def of_batch(self, batch: Tensor) -> Tensor:
        """Return the pictures of such patches."""
        return pictures_of(batch)
