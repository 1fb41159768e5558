"""Calls with other layouts than those of the examples, because examples may coincide."""

from collections.abc import Iterator

import torch
from torch import Tensor

from varlen_graphs.doctor.example_call import ExampleCall


def other_layouts(example: ExampleCall) -> Iterator[ExampleCall]:
    """Yield calls with the rows of an example and other items: as many in another order and form, and others in number.

    Only for calls of two tensors, rows and items, without numbers: nothing else follows from the items then.
    """
    tensors = {name: value for name, value in example.kwargs.items() if isinstance(value, Tensor)}
    if len(tensors) != 2 or example.args or any(type(own) in (int, float) for own in example.numbers().values()):
        return
    rows, (name, items) = max(tensors.values(), key=Tensor.numel), min(tensors.items(), key=lambda own: own[1].numel())
    if items.is_floating_point() or items.dtype == torch.bool or items.is_nested or rows.is_nested or not items.numel():
        return
    others = _grids(items) if items.dim() == 2 and items.shape[1] == 3 else _lengths(items, rows)
    for other in others:
        if other.shape != items.shape or not torch.equal(other, items):
            yield ExampleCall((), example.kwargs | {name: other})


def _grids(grid: Tensor) -> Iterator[Tensor]:
    """Yield grids `(t, h, w)` of as many rows: turned, in reverse order; and each frame by itself."""
    yield grid.flip(0)[:, [0, 2, 1]].contiguous()
    frames = grid.repeat_interleave(grid[:, 0].clamp(min=0), 0)
    frames[:, 0] = 1
    yield frames


def _lengths(lengths: Tensor, rows: Tensor) -> Iterator[Tensor]:
    """Yield lengths, or their sums from 0 on, of as many rows."""
    total = int(lengths.sum()) if lengths.dim() == 1 else -1
    if total in rows.shape and int(lengths.min()) >= 0:
        yield lengths.flip(0)
        half = lengths[:1] // 2
        yield torch.cat([half, lengths[:1] - half, lengths[1:]])
    elif (
        lengths.dim() == 1 and lengths[0] == 0 and int(lengths[-1]) in rows.shape and bool((lengths.diff() >= 0).all())
    ):
        yield torch.cat([lengths[:1], lengths.diff().flip(0).cumsum(0).to(lengths.dtype)])
