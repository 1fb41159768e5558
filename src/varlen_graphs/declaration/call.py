"""One call: its arguments, sorted."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from varlen_graphs.declaration.static_args import StaticKey
from varlen_graphs.layouts.items import Layout
from varlen_graphs.layouts.packed_batch import GatherIndices, Sizes

EMPTY_ITEM = "an item has no rows"
"""Reason why the module itself answers a call: what it does with such an item is its own business."""


@dataclass(slots=True)
class Call:
    """The arguments of one call, sorted.

    Attributes:
        rows: The rows, packed `[rows, ...]` (a view, where the argument has its rows in another dimension), or
            `[batch, length, ...]`; `[batch, *padded, ...]` while they are `to_pack`.
        description: The arguments that describe the items, by name: the layout argument first, then the columns
            (`None` where absent) and the mask of a batch to pack.
        static_args: Other arguments, for which graphs are captured; arguments equal to their default are left out.
        key: `static_args` as a key.
        original: All arguments by name, as the caller passed them; empty where `rows` are a part of the caller's.
        eager_reason: Reason why only the original module can answer this call; `None` if graphs can.
        layout: The items; `None` while only the GPU has seen them.
        padded: Size to which the items of a batch were padded that was packed on its way in: `(length,)`, or `(height,
            width)` in patches for pictures; empty for other calls.
        sizes: Sizes of the items of such a batch; empty for other calls.
        gather_indices: Indices of the real rows in such a batch; `None` for other calls.
        to_pack: True while such rows, and the tensors beside them with an entry a row, are still padded.
        staged: True if `rows` already lie in the arena, where the caller wrote them.
        inputs: Tensors beside the rows, by name, entries first; those left to their defaults are missing.
        positional: Number of arguments that the caller passed by position.
    """

    rows: Tensor
    description: dict[str, Any]
    static_args: dict[str, Any]
    key: StaticKey
    original: dict[str, Any]
    eager_reason: str | None
    layout: Layout | None = None
    padded: tuple[int, ...] = ()
    sizes: Sizes = ()
    gather_indices: GatherIndices | None = None
    to_pack: bool = False
    staged: bool = False
    inputs: dict[str, Tensor] = field(default_factory=dict)
    positional: int = 0

    @property
    def shape(self) -> Sequence[int]:
        """Shape of the rows as graphs take them: packed, if they are to be packed."""
        if self.to_pack and self.layout is not None:
            return (self.layout.total, *self.rows.shape[1 + len(self.padded) :])
        return self.rows.shape

    @property
    def requires_grad(self) -> bool:
        """True if a tensor of the call requires grad."""
        if self.rows.requires_grad or not self.inputs:
            return self.rows.requires_grad
        return any(tensor.requires_grad for tensor in self.inputs.values())

    @property
    def items(self) -> int:
        """Number of items. A description that only the GPU has seen is a tensor with an entry an item."""
        return len(next(iter(self.description.values())) if self.layout is None else self.layout)
