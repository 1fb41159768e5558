"""Argument that describes a padded batch by the mask of its real rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.checks.fields import check_fields
from varlen_graphs.checks.values import INTEGERS, is_dense, quoted, stacked
from varlen_graphs.errors import LayoutError, counted
from varlen_graphs.layouts.arguments import LayoutArgument
from varlen_graphs.layouts.columns import Column
from varlen_graphs.layouts.items import Layout
from varlen_graphs.layouts.padded import check_mask_dtype, key_padding_mask, real_rows


@dataclass(frozen=True)
class Mask(LayoutArgument):
    """Argument that describes a padded batch by a key padding mask `[batch, length]`.

    The real rows of each item come first. A module that takes padded batches, and the argument, receives a mask of the
    budget's shape, computed inside the graph with the same convention.

    For a module that takes packed rows, `packed=True`: calls bring the rows as `[batch, length, ...]` with the mask.
    The graph packs the batch, or one launch ahead of it if it is not contiguous or of another dtype, and outputs
    declared as `Rows()` are returned as `[batch, length, ...]` with zeros past the end of each item, two launches each.
    Budgets count packed rows. The module does not get the mask: packed rows need none.

    Attributes:
        name: Name of the argument. A call may bring nested lists, or a tensor of bool or of 0 and 1 on the CPU or the
            GPU. A tensor on the GPU costs one copy of a few integers to the host.
        dtype: Dtype of the mask that the module receives: `torch.bool`, or an integer dtype.
        real: Value of real rows: True (1), as in transformers, or False (0), as in `key_padding_mask` of
            `torch.nn.MultiheadAttention`.
        columns: Extra integers that each item carries.
        prefix: Number of rows that the module puts before those of each item, such as a class token and registers.
            Calls do not bring them, and budgets do not count them.
        optional: If True, calls may leave the mask out. All of their rows are then real.
        packed: If True, the module takes packed rows, and `dtype` has no effect.

    Raises:
        SpecError: `dtype` is neither bool nor an integer dtype, `real`, `optional` or `packed` is not a bool, or
            `columns` are not columns.
    """

    name: str = "attention_mask"
    dtype: torch.dtype = torch.int64
    real: bool = True
    columns: tuple[Column, ...] = ()
    prefix: int = 0
    optional: bool = False
    packed: bool = False

    @cached_property
    def padded(self) -> bool:  # type: ignore[override]  # read only, as all fields of a frozen class
        """True if the module takes the padded batch as it is."""
        return not self.packed

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        check_mask_dtype(self, self.dtype)

    def parse(self, value: Any) -> list[tuple[int, int, int]]:
        """Check `value` and return its items as `(1, 1, length)`.

        Raises:
            LayoutError: `value` is not a mask `[batch, length]` of bool or of 0 and 1, or the real rows of an item are
                not its first rows.
        """
        mask = self._tensor(value).cpu().numpy()  # torch takes several times as long for so few numbers
        ones = mask.sum(1)  # of a mask of 0 and 1, which the comparison shows it to be
        place = numpy.arange(mask.shape[1])
        if self.real:
            lengths, expected = ones.tolist(), place < ones[:, None]
        else:
            lengths, expected = (mask.shape[1] - ones).tolist(), place >= mask.shape[1] - ones[:, None]
        if not (mask == expected).all():
            self._raise_invalid(mask)
        return [(1, 1, length) for length in lengths]

    def batch_length(self, value: Any, items: Sequence[tuple[int, int, int]], shape: Sequence[int]) -> int:
        """Return the length of the batch, that of the longest item if there are no rows yet, or 0 if rows are packed.

        Raises:
            LayoutError: The mask has another length than the batch.
        """
        length = value.shape[1] if isinstance(value, Tensor) else len(value[0])
        if shape and length != shape[1]:
            raise LayoutError(
                f"{self.name} is {[len(items), length]}, but the rows are {list(shape)}: expected a mask "
                f"[batch, length] = {list(shape[:2])}; pass the mask that belongs to these rows"
            )
        if self.packed:
            return 0
        return shape[1] if shape else max(length for _, _, length in items)

    def missing(self, shape: Sequence[int]) -> Tensor:
        """Return the mask of a batch of this shape in which all rows are real, bool `[batch, length]` on the CPU."""
        return torch.full((shape[0], shape[1]), self.real, device="cpu")

    def marks(self, value: Any, lengths: Sequence[int], length: int) -> bool:
        """Return True if `value` is the mask of items of these lengths in a batch of this length.

        A mask on a GPU costs one copy to the host; `parse` would cost about eight launches.

        Raises:
            LayoutError: `value` is not a mask `[batch, length]` of bool or integers.
        """
        mask = self._tensor(value).cpu()
        expected = key_padding_mask(real_rows(torch.tensor(lengths, device="cpu"), length), mask.dtype, self.real)
        return torch.equal(mask, expected)

    def argument(self, values: Tensor, budget: Budget) -> Tensor:
        """Return this argument for the module: a mask `[batch, length]`, from the values of an item table."""
        return key_padding_mask(real_rows(values[:, 2], budget.max_seqlen), self.dtype, self.real)

    def _tensor(self, value: Any) -> Tensor:
        expected = "expected a key padding mask [batch, length] of bool, or of 0 and 1"
        value = stacked(self.name, value)
        mask = value if isinstance(value, Tensor) else self._from_lists(value, expected)
        if not is_dense(mask):
            raise LayoutError(f"{self.name} is a sparse, nested or meta tensor: {expected}, in a dense one")
        if mask.dim() != 2:
            raise LayoutError(f"{self.name} is {list(mask.shape)}: {expected}")
        if mask.numel() == 0:
            raise LayoutError(f"{self.name} is empty: {expected}; skip the call when there is nothing to encode")
        if mask.dtype != torch.bool and mask.dtype not in INTEGERS:
            raise LayoutError(f"{self.name} is a {mask.dtype} tensor: {expected}; try {self.name}.bool()")
        return mask

    def _from_lists(self, value: Any, expected: str) -> Tensor:
        """Convert nested lists or an array to a CPU tensor; torch crashes the process on very deep lists."""
        rows = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(rows, list | tuple):
            rows = [row.tolist() if hasattr(row, "tolist") and not isinstance(row, Tensor) else row for row in rows]
        flat = isinstance(rows, list) and all(isinstance(row, list | tuple) for row in rows)
        if not flat or not {*map(type, chain.from_iterable(rows))} <= {bool, int, float}:
            raise LayoutError(f"{self.name} is not a mask ({quoted(value)}): {expected}")
        try:
            return torch.tensor(rows, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:  # rows of several lengths, or a number past int64
            raise LayoutError(f"{self.name} is not a mask ({error}): {expected}") from None

    def _raise_invalid(self, mask: "numpy.ndarray[Any, Any]") -> NoReturn:
        counts = (mask == self.real).sum(1)
        expected = (numpy.arange(mask.shape[1]) < counts[:, None]) == self.real
        index = int((mask != expected).any(1).argmax())
        entry, length = mask[index].tolist(), int(counts[index])
        what, mark = f"{self.name}[{index}]", int(self.real)
        if not {*entry} <= {0, 1}:
            raise LayoutError(f"{what} has values other than 0 and 1: expected a key padding mask [batch, length]")
        raise LayoutError(
            f"{what} marks {counted(length, 'row')} as real ({mark}), but not the first {length}: expected items "
            "padded on the right; with a tokenizer of transformers set tokenizer.padding_side = 'right'"
        )


def check_marks(mask: Mask, value: Any, name: str, layout: Layout, shape: Sequence[int]) -> None:
    """Check that a mask marks exactly the rows of the items described by the argument `name` as real."""
    if mask.marks(value, layout.rows, shape[1]):
        return
    marked = mask.parse(value)  # raises a specific error for a malformed mask
    mask.batch_length(value, marked, shape)
    lengths = tuple(length for _, _, length in marked)
    if lengths != layout.rows:
        raise LayoutError(
            f"{mask.name} marks {quoted(list(lengths))} rows as real, but {name} describes items of "
            f"{quoted(list(layout.rows))} rows: expected the same rows in both"
        )
