"""Padded batches: rows `[batch, length, ...]`, and the argument that says which of them are real."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor

from varlen_graphs.errors import LayoutError, SpecError
from varlen_graphs.layout.arguments import LayoutArgument
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.columns import Column
from varlen_graphs.layout.grids import Lengths
from varlen_graphs.layout.items import Layout
from varlen_graphs.layout.values import INTEGERS, is_dense, quoted


class Padded(LayoutArgument):
    """An argument that describes a padded batch: each item is padded on the right, to the length of the batch."""

    padded = True
    rows_are = "a batch of items, each padded on the right to the same length"

    def check_rows(self, layout: Layout, shape: Sequence[int], rows: str) -> None:
        """Whether these are the items of the batch that came.

        Raises:
            LayoutError: Another number of items, or one that is longer than the batch.
        """
        check_batch(self.name, layout, shape, rows)


@dataclass(frozen=True)
class PaddedLengths(Padded):
    """The argument that describes a padded batch by the number of real rows of each item.

    The module sees it, where it takes that argument, as int64 `[batch]` with 0 for items of padding.

    Attributes:
        name: The argument. A call may bring a list, or a tensor `[batch]` on the CPU, or on the GPU, which costs one
            copy to the host.
        columns: Extra integers an item carries.
    """

    name: str = "lengths"
    columns: tuple[Column, ...] = ()

    def parse(self, value: Any) -> list[tuple[int, int, int]]:
        """Check `value` and return its items as `(1, 1, length)`.

        Raises:
            LayoutError: Not `[batch]` integers, no items, or a length below 1.
        """
        return Lengths(self.name).parse(value)

    def batch_length(self, value: Any, items: Sequence[tuple[int, int, int]], shape: Sequence[int]) -> int:
        """The length of the batch that came; that of the longest item where there are no rows yet."""
        return shape[1] if shape else max(length for _, _, length in items)

    def argument(self, values: Tensor, budget: Budget) -> Tensor:
        """What the module gets of the values of an item table: int64 `[batch]`."""
        return values[:, 2]


@dataclass(frozen=True)
class PaddedMask(Padded):
    """The argument that describes a padded batch by a key padding mask `[batch, length]`: of each item the first rows.

    The module sees it, where it takes that argument, at the shape of the budget: computed inside the graph, by the same
    convention.

    Attributes:
        name: The argument. A call may bring nested lists, or a tensor of bool or of 0 and 1 on the CPU, or on the GPU,
            which costs one copy of a few integers to the host.
        dtype: What the module sees: `torch.bool`, or integers.
        real: What marks real rows: True (and 1), as in transformers, or False (and 0), as in `key_padding_mask` of
            `torch.nn.MultiheadAttention`.
        columns: Extra integers an item carries.
    """

    name: str = "attention_mask"
    dtype: torch.dtype = torch.int64
    real: bool = True
    columns: tuple[Column, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_mask_dtype(self, self.dtype)

    def parse(self, value: Any) -> list[tuple[int, int, int]]:
        """Check `value` and return its items as `(1, 1, length)`.

        Raises:
            LayoutError: Not a mask `[batch, length]` of bool, 0 and 1, or an item that is not a prefix of real rows.
        """
        mask = self._tensor(value)
        lengths = (mask == self.real).sum(1)
        expected = key_padding_mask(real_rows(lengths, mask.shape[1]), mask.dtype, self.real)
        facts = torch.stack([lengths, (mask == expected).all(1)], 1).tolist()  # one copy, where it is on a GPU
        for index, (length, sound) in enumerate(facts):
            if not (sound and length):
                self._refuse(index, mask[index].tolist(), length)
        return [(1, 1, length) for length, _ in facts]

    def batch_length(self, value: Any, items: Sequence[tuple[int, int, int]], shape: Sequence[int]) -> int:
        """The length of the batch that came; that of the longest item where there are no rows yet.

        Raises:
            LayoutError: The mask is of another length.
        """
        if shape and len(value[0]) != shape[1]:
            raise LayoutError(
                f"{self.name} is {[len(items), len(value[0])]}, but the rows are {list(shape)}: expected a mask "
                f"[batch, length] = {list(shape[:2])}"
            )
        return shape[1] if shape else max(length for _, _, length in items)

    def marks(self, value: Any, lengths: Sequence[int], length: int) -> bool:
        """Whether `value` is the mask of just these items in a batch of this length.

        Of a mask on a GPU this is one copy to the host, where finding the items (`parse`) is some eight launches.

        Raises:
            LayoutError: No mask `[batch, length]` of bool or of integers.
        """
        mask = self._tensor(value).cpu()
        expected = key_padding_mask(real_rows(torch.tensor(lengths, device="cpu"), length), mask.dtype, self.real)
        return torch.equal(mask, expected)

    def argument(self, values: Tensor, budget: Budget) -> Tensor:
        """What the module gets of the values of an item table: `[batch, length]`."""
        return key_padding_mask(real_rows(values[:, 2], budget.max_seqlen), self.dtype, self.real)

    def _tensor(self, value: Any) -> Tensor:
        expected = "expected a key padding mask [batch, length] of bool, or of 0 and 1"
        mask = value if isinstance(value, Tensor) else self._of_lists(value, expected)
        if not is_dense(mask):
            raise LayoutError(f"{self.name} is a sparse, nested or meta tensor: {expected}, in a dense one")
        if mask.dim() != 2:
            raise LayoutError(f"{self.name} is {list(mask.shape)}: {expected}")
        if mask.numel() == 0:
            raise LayoutError(f"{self.name} is empty: {expected}; skip the call when there is nothing to encode")
        if mask.dtype != torch.bool and mask.dtype not in INTEGERS:
            raise LayoutError(f"{self.name} is a {mask.dtype} tensor: {expected}; try {self.name}.bool()")
        return mask

    def _of_lists(self, value: Any, expected: str) -> Tensor:
        """A mask that came as lists or an array, on the CPU. Torch ends the process where lists are very deep."""
        rows = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(rows, list | tuple):
            rows = [row.tolist() if hasattr(row, "tolist") and not isinstance(row, Tensor) else row for row in rows]
        flat = isinstance(rows, list) and all(isinstance(row, list | tuple) for row in rows)
        if not flat or not {*map(type, chain.from_iterable(rows))} <= {bool, int, float}:
            raise LayoutError(f"{self.name} is no mask ({quoted(value)}): {expected}")
        try:
            return torch.tensor(rows, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:  # rows of several lengths, or a number past int64
            raise LayoutError(f"{self.name} is no mask ({error}): {expected}") from None

    def _refuse(self, index: int, entry: list[int], length: int) -> NoReturn:
        """Say what is wrong with the mask of one item."""
        what, mark = f"{self.name}[{index}]", int(self.real)
        if not {*entry} <= {0, 1}:
            raise LayoutError(f"{what} has values other than 0 and 1: expected a key padding mask [batch, length]")
        if not length:
            raise LayoutError(f"{what} marks no row as real ({mark}); drop items that are empty")
        raise LayoutError(
            f"{what} marks {length} rows as real ({mark}), but not the first {length}: expected items padded on the "
            "right; with a tokenizer of transformers set tokenizer.padding_side = 'right'"
        )


def check_batch(name: str, layout: Layout, shape: Sequence[int], rows: str) -> None:
    """Whether the items that the argument `name` describes are those of a batch.

    Raises:
        LayoutError: Another number of items, or one that is longer than the batch.
    """
    if len(layout) != shape[0] or max(layout.rows) > shape[1]:
        raise LayoutError(
            f"{name} describes {len(layout)} items, the longest of {max(layout.rows)} rows, but {rows} is "
            f"{list(shape)}: expected [batch, length, ...] with one entry an item, and none longer than the batch"
        )


def check_marks(mask: PaddedMask, value: Any, name: str, layout: Layout, shape: Sequence[int]) -> None:
    """Whether a mask marks the rows of a batch as real that belong to the items the argument `name` describes.

    Raises:
        LayoutError: No mask `[batch, length]` of items padded on the right, or one that marks more or fewer rows.
    """
    if mask.marks(value, layout.rows, shape[1]):
        return
    marked = mask.parse(value)  # which says what is wrong with it
    mask.batch_length(value, marked, shape)
    lengths = tuple(length for _, _, length in marked)
    if lengths != layout.rows:
        raise LayoutError(
            f"{mask.name} marks {quoted(list(lengths))} rows as real, but the items that {name} describes have "
            f"{quoted(list(layout.rows))}: expected the same of both"
        )


def pack_rows(batch: Tensor, lengths: Sequence[int]) -> Tensor:
    """The real rows of a padded batch one after another, `[rows, ...]`.

    One launch, or a view of a batch in which nothing is padded.
    """
    if min(lengths) == batch.shape[1]:
        return batch.flatten(0, 1)
    return torch.cat([item[:length] for item, length in zip(batch, lengths, strict=True)])


def pad_rows(rows: Tensor, lengths: Sequence[int], length: int) -> Tensor:
    """The batch of such rows, `[batch, length, ...]`, with zeros past the end of each item.

    Two launches, or a view where nothing is to be padded.
    """
    if min(lengths) == length:
        return rows.view(len(lengths), length, *rows.shape[1:])
    batch = rows.new_zeros(len(lengths), length, *rows.shape[1:])
    torch._foreach_copy_([item[:own] for item, own in zip(batch, lengths, strict=True)], rows.split(list(lengths)))
    return batch


def real_rows(lengths: Tensor, length: int) -> Tensor:
    """Whether each row of a padded batch belongs to its item: bool `[batch, length]`, of `lengths` `[batch]`."""
    return torch.arange(length, device=lengths.device) < lengths[:, None]


def key_padding_mask(is_real: Tensor, dtype: torch.dtype, real: bool) -> Tensor:
    """What marks real rows, by the convention of a module: `real` for them, in `dtype`."""
    return (is_real if real else ~is_real).to(dtype)


def check_mask_dtype(declaration: Any, dtype: torch.dtype) -> None:
    """Whether a mask can be of this dtype.

    Raises:
        SpecError: It is neither bool nor an integer.
    """
    if dtype.is_floating_point or dtype.is_complex:
        raise SpecError(f"{declaration!r}: expected a dtype of bool or integers; have the module make scores of it")
