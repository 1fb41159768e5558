"""Calls with made-up items and random rows, for the proof of new graphs."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.graphs.capturer import CaptureInputs
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.items import Layout
from varlen_graphs.layout.padded import pad_rows
from varlen_graphs.layout.samples import sample_item, sample_layout
from varlen_graphs.layout.span import Span
from varlen_graphs.spec.buffer_spec import BufferSpec
from varlen_graphs.spec.call import Call
from varlen_graphs.spec.entries import Extent
from varlen_graphs.spec.statics import static_key

Sizes = Sequence[tuple[int, int]]
"""Frames, and rows a frame, of some items."""

SMALL: Sequence[Sizes] = [
    [(1, 32), (1, 24), (1, 12)],
    [(1, 12), (1, 8)],
    [(1, 1), (1, 1)],
    [(1, 32)],
    [(1, 8)],
    [(1, 1)],
]
"""Small items, no larger than those of warm-up: a module may have a limit of its own, such as a table of positions."""

MIXED: Sequence[Sizes] = [
    [(1, 24), (3, 12), (1, 35), (2, 16), (1, 8), (1, 32)],
    [(1, 24), (3, 12), (2, 16), (1, 8)],
    [(3, 12), (1, 24)],
    [(1, 24), (1, 12), (1, 35), (1, 16), (1, 8), (1, 32)],
    [(1, 24), (1, 12)],
]
"""Items of several sizes and numbers of frames; poorer ones where a budget or a module takes no richer ones."""

EDGES: Sequence[Sizes] = [[(1, 21)], [(1, 12), (1, 1), (1, 8)], [(1, 1)]]
"""One item or three, odd numbers of rows, and one row."""

FEW_ROWS = 512
"""Largest budget in rows for which an eager run of twice its rows is cheap."""

ID_LIMIT = 1024
"""Integer rows are below this, and below the size of every table of the module, which they may index."""


def small_layouts(spec: BufferSpec, budget: Budget) -> Iterator[Layout]:
    """Yield layouts of a few small items that leave padding in a budget, then any that it holds."""
    layouts = [_layout(spec, sizes) for sizes in SMALL]
    fitting = [layout for layout in layouts if _fits(spec, layout, budget)]
    yield from (layout for layout in fitting if layout.size < budget.rows)
    yield from (layout for layout in fitting if layout.size >= budget.rows)
    yield sample_layout(spec.layout, budget, spec.needs.windows)


def mixed_layouts(spec: BufferSpec, budget: Budget) -> Iterator[Layout]:
    """Yield layouts of several kinds of items that a budget holds, the richest first."""
    for sizes in MIXED:
        if spec.layout.has_frames or all(frames == 1 for frames, _ in sizes):
            layout = _layout(spec, sizes)
            if _fits(spec, layout, budget):
                yield layout
    yield from small_layouts(spec, budget)


def edge_layouts(spec: BufferSpec, budget: Budget) -> Iterator[Layout]:
    """Yield layouts at the edges of a budget: of few items and rows, of all its items, of all its rows."""
    layouts = [_layout(spec, sizes) for sizes in (*EDGES, [(1, 1)] * budget.items)]
    layouts.append(sample_layout(spec.layout, budget, spec.needs.windows))
    yield from (layout for layout in layouts if _fits(spec, layout, budget))


def split_layout(spec: BufferSpec, largest: Budget) -> Layout:
    """Return a layout of several items, of more rows than the largest budget has if these are few."""
    pairs = 1 + 2 * largest.rows // 20 if largest.rows <= FEW_ROWS else 1
    return _layout(spec, [(1, 12), (1, 8)] * pairs)


def _layout(spec: BufferSpec, sizes: Sizes) -> Layout:
    unit, items = spec.row_multiple, []
    for at, (frames, rows) in enumerate(sizes):
        _, *rest = sample_item(spec.layout, max(1, round(rows / unit)) * unit, spec.layout.merge)
        items.append((frames, *rest))
        if spec.layout.grouped and at % 3 == 2:  # two of three items are groups of their own
            items[-1] = (*items[-1][:-1], 0)
    length = max(t * h * w for t, h, w, *_ in items) if spec.layout.padded else 0
    return Layout(tuple(items), length, spec.layout.grouped)


def _fits(spec: BufferSpec, layout: Layout, budget: Budget) -> bool:
    return budget.holds(*spec.needs.load(layout))


def make_calls(forward: Forward, layout: Layout, inputs: CaptureInputs) -> Iterator[Call]:
    """Yield calls of these items as a user makes them, with all arguments by name.

    The first has random tensors. If some are integers, another one has their declared pads in all entries.
    """
    yield _call(forward, layout, inputs, _random)
    dtypes = [forward.row_dtype, *map(forward.input_dtype, forward.spec.inputs)]
    if not all(dtype.is_floating_point or dtype.is_complex for dtype in dtypes):
        yield _call(forward, layout, inputs, _pads)


def _call(forward: Forward, layout: Layout, inputs: CaptureInputs, make: "_Make") -> Call:
    spec, packed = forward.spec, forward.spec.packed
    statics, row_shape, device = inputs
    span, length = Span.of(layout), max(layout.rows)

    def entries(extent: Extent, shape: Sequence[int], dtype: torch.dtype, ids: range, pad: float, at: int) -> Tensor:
        """Return entries as a call brings them: a batch to pack is still padded."""
        made = make([*extent.size(span), *shape], prod(shape), dtype, ids, pad, device, at)
        return pad_rows(made, layout.rows, length) if packed.padded_by and extent is spec.row_extent else made

    tensors = {}
    for at, (one, extent) in enumerate(spec.input_extents, start=1):
        dtype = forward.input_dtype(one)
        tensors[one.name] = entries(extent, one.shape, dtype, _valid_ids(forward, one.pad, dtype), one.pad, at)
    ids = _valid_ids(forward, packed.pad, forward.row_dtype, packed.normalize is not None)
    rows = entries(spec.row_extent, row_shape, forward.row_dtype, ids, packed.pad, 0)
    description = _describe(spec, layout, device)
    if packed.padded_by is not None:
        lengths = torch.tensor(layout.rows, device=device)
        description[packed.padded_by] = torch.arange(length, device=device) < lengths[:, None]
    original = {packed.name: packed.as_argument(rows), **description, **statics}
    original |= {one.name: one.as_argument(tensors[one.name]) for one in spec.inputs}
    return Call(rows, description, dict(statics), static_key(statics), original, None, inputs=tensors)


def _describe(spec: BufferSpec, layout: Layout, device: torch.device) -> dict[str, Any]:
    """Return the arguments that describe the items."""
    table = torch.tensor(layout.items, device=device)
    description: dict[str, Any] = {spec.layout.name: spec.layout.argument(table, spec.exact_budget(layout))}
    for at, column in enumerate(spec.layout.columns, start=3):
        if column.function is None:
            values = [item[at] for item in layout.items]
            nested = [[values[i] for i in group] for group in layout.groups]
            description[column.name] = nested if column.groups else values
    return description


_Make = Callable[[Sequence[int], int, torch.dtype, range, float, torch.device, int], Tensor]
"""Makes a tensor of a shape, with entries of so many numbers: its dtype, valid integers, pad, device, and a seed."""


def _pads(
    shape: Sequence[int], width: int, dtype: torch.dtype, ids: range, pad: float, device: torch.device, seed: int
) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return _random(shape, width, dtype, ids, pad, device, seed)
    return torch.full([*shape], pad, dtype=dtype, device=device)


def _random(
    shape: Sequence[int], width: int, dtype: torch.dtype, ids: range, pad: float, device: torch.device, seed: int
) -> Tensor:
    """Return random entries in the dtype that calls bring; leaves the default generator alone."""
    generator = torch.Generator(device).manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        drawn = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn([*shape], generator=generator, device=device, dtype=drawn).to(dtype)
    if width > 1:
        return torch.randint(ids.start, ids.stop, tuple(shape), generator=generator, device=device).to(dtype)
    order = torch.randperm(len(ids), generator=generator, device=device)  # as few equal entries as possible
    return (ids.start + order[torch.arange(prod(shape), device=device) % len(order)]).view([*shape]).to(dtype)


def _valid_ids(forward: Forward, pad: float, dtype: torch.dtype, pixels: bool = False) -> range:
    """Return the integers that entries may hold: the declared pad is valid, and so are ids below all tables."""
    if dtype.is_floating_point or dtype.is_complex:
        return range(0)
    if pixels or dtype in (torch.bool, torch.uint8):
        return range(2 if dtype == torch.bool else 128)
    pad = int(pad)
    tensors = chain(forward.module.parameters(), forward.module.buffers())
    end = min([ID_LIMIT, *(len(tensor) for tensor in tensors if tensor.dim() > 1 and len(tensor) > 1)])
    if pad + 2 <= end:
        return range(max(0, pad), end)
    return range(end) if 0 <= pad < end else range(pad, pad + 1)
