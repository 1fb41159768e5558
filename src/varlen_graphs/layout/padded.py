"""Padded batches: rows `[batch, length, ...]`, and the arguments that describe which of them are real."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor

from varlen_graphs.errors import LayoutError, SpecError, counted
from varlen_graphs.layout.arguments import LayoutArgument
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.columns import Column
from varlen_graphs.layout.fields import check_fields
from varlen_graphs.layout.grids import parse_lengths
from varlen_graphs.layout.items import Layout
from varlen_graphs.layout.values import INTEGERS, is_dense, quoted, stacked


class Padded(LayoutArgument):
    """Base class of arguments that describe a padded batch, in which items are padded on the right to one length."""

    padded = True
    rows_are = "a batch of items, each padded on the right to the same length"

    def check_rows(self, layout: Layout, shape: Sequence[int], rows: str) -> None:
        """Check that the items are those of a batch of this shape."""
        check_batch(self.name, layout, shape, rows)


@dataclass(frozen=True)
class PaddedLengths(Padded):
    """Argument that describes a padded batch by the number of real rows of each item.

    A module that takes the argument receives it as int64 `[batch]`, with 0 for padding items.

    Attributes:
        name: Name of the argument. A call may bring a list, or a tensor `[batch]` on the CPU or the GPU. A tensor on
            the GPU costs one copy to the host.
        columns: Extra integers that each item carries.
        prefix: Number of rows that the module puts before those of each item, such as a class token and registers.
            Calls do not bring them, and budgets do not count them.
    """

    name: str = "lengths"
    columns: tuple[Column, ...] = ()
    prefix: int = 0

    def parse(self, value: Any) -> list[tuple[int, int, int]]:
        """Check `value`, which must be integers `[batch]` of at least 0, and return its items as `(1, 1, length)`."""
        return parse_lengths(self.name, value)

    def batch_length(self, value: Any, items: Sequence[tuple[int, int, int]], shape: Sequence[int]) -> int:
        """Return the length of the batch, or that of the longest item if there are no rows yet."""
        return shape[1] if shape else max(length for _, _, length in items)

    def argument(self, values: Tensor, budget: Budget) -> Tensor:
        """Return this argument for the module: int64 `[batch]`, from the values of an item table."""
        return values[:, 2]


@dataclass(frozen=True)
class PaddedMask(Padded):
    """Argument that describes a padded batch by a key padding mask `[batch, length]`.

    The real rows of each item come first. A module that takes the argument receives a mask of the budget's shape,
    computed inside the graph with the same convention.

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

    Raises:
        SpecError: `dtype` is neither bool nor an integer dtype, `real` or `optional` is not a bool, or `columns` are
            not columns.
    """

    name: str = "attention_mask"
    dtype: torch.dtype = torch.int64
    real: bool = True
    columns: tuple[Column, ...] = ()
    prefix: int = 0
    optional: bool = False

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
        """Return the length of the batch, or that of the longest item if there are no rows yet.

        Raises:
            LayoutError: The mask has another length than the batch.
        """
        length = value.shape[1] if isinstance(value, Tensor) else len(value[0])
        if shape and length != shape[1]:
            raise LayoutError(
                f"{self.name} is {[len(items), length]}, but the rows are {list(shape)}: expected a mask "
                f"[batch, length] = {list(shape[:2])}; pass the mask that belongs to these rows"
            )
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


@dataclass(frozen=True)
class PackedMask(PaddedMask):
    """Argument that describes a padded batch by a key padding mask, for modules that take packed rows.

    Calls bring the rows as `[batch, length, ...]` with the mask. The graph packs the batch, or one launch ahead of it
    if it is not contiguous or of another dtype, and outputs declared as `Rows()` are returned as `[batch, length, ...]`
    with zeros past the end of each item, two launches each. Budgets count packed rows. The module does not get the
    mask: packed rows need none.

    The attributes are those of a `PaddedMask`, `dtype` without effect. A mask on the GPU costs one copy of a few
    integers to the host.
    """

    padded = False
    packs = True

    def batch_length(self, value: Any, items: Sequence[tuple[int, int, int]], shape: Sequence[int]) -> int:
        """Return 0, because the rows are packed; raises `LayoutError` for a mask of another length than the batch."""
        super().batch_length(value, items, shape)
        return 0


def check_batch(name: str, layout: Layout, shape: Sequence[int], rows: str) -> None:
    """Check that the items described by the argument `name` are those of a batch."""
    if len(layout) != shape[0] or layout.longest > shape[1]:
        raise LayoutError(
            f"{name} describes {counted(len(layout), 'item')}, the longest of {counted(layout.longest, 'row')}, but "
            f"{rows} is "
            f"{list(shape)}: expected [batch, length, ...] with one entry per item, and no item longer than the batch"
        )


def check_marks(mask: PaddedMask, value: Any, name: str, layout: Layout, shape: Sequence[int]) -> None:
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


def real_rows(lengths: Tensor, length: int) -> Tensor:
    """Return the real rows of a padded batch as a mask, bool `[batch, length]`, from `lengths` `[batch]`."""
    return torch.arange(length, device=lengths.device) < lengths[:, None]


def key_padding_mask(is_real: Tensor, dtype: torch.dtype, real: bool) -> Tensor:
    """Convert a mask of real rows to the convention of a module: `real` for real rows, in `dtype`."""
    return (is_real if real else ~is_real).to(dtype)


def check_mask_dtype(declaration: Any, dtype: torch.dtype) -> None:
    """Check that a mask can have this dtype."""
    if dtype.is_floating_point or dtype.is_complex:
        raise SpecError(
            f"{declaration!r}: expected torch.bool or an integer dtype; let the module turn the mask into scores"
        )


def shifted(batch: Tensor, shift: Tensor) -> Tensor:
    """Return `[batch, length, ...]` with the tokens of each text moved `shift` `[batch]` places on, around the end."""
    length = batch.shape[1]
    places = (torch.arange(length, device=batch.device) - shift.to(batch.device)[:, None]) % length
    return batch[torch.arange(len(batch), device=batch.device)[:, None], places]
