"""Calls with made-up items and random rows, for the proof of new graphs."""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.buffers import AttentionMask
from varlen_graphs.graphs.capturer import CaptureInputs
from varlen_graphs.graphs.first_run import valid_ids
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.items import Layout
from varlen_graphs.layout.packed_batch import item_sizes, pad_rows
from varlen_graphs.layout.padded import key_padding_mask, real_rows
from varlen_graphs.layout.samples import sample_item, sample_layout
from varlen_graphs.layout.span import Span
from varlen_graphs.spec.buffer_spec import BufferSpec
from varlen_graphs.spec.call import Call
from varlen_graphs.spec.entries import Extent, filled

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

MIXED: list[list[tuple[int, int]]] = [
    [(1, 24), (3, 12), (1, 35), (2, 16), (1, 8), (1, 32)],
    [(1, 24), (3, 12), (2, 16), (1, 8)],
    [(3, 12), (1, 24)],
    [(1, 24), (1, 12), (1, 35), (1, 16), (1, 8), (1, 32)],
    [(1, 24), (1, 12)],
]
"""Items of several sizes and numbers of frames; poorer ones where a budget or a module takes no richer ones."""

EDGES: list[Sizes] = [[(1, 23)], [(1, 11), (1, 1), (1, 13)], [(1, 1)]]
"""One item or three, odd numbers of rows, and one row. In fours, lengths of `SMALL`: libraries plan for new ones."""

RICH: Sequence[Sizes] = [
    [(1, 480), (3, 24), (2, 80), (1, 32), (1, 16), (2, 8), (1, 8)],
    [(1, 288), (2, 144), (3, 36), (1, 36), (1, 36)],
    [(1, 120), (3, 12), (1, 24), (2, 16), (1, 12), (1, 8)],
]
"""Items larger than windows and tiles; the sides of the first are even, those of the second are divisible by 6."""

CROWD: Sizes = [((1, 8), (1, 24), (1, 16), (1, 16))[at % 4] for at in range(65)]
"""More items and rows than a module may have in mind that treats them in groups, or as one from some number on."""

LENGTHS: Sizes = [(1, 1 + 7 * at % 32) for at in range(65)]
"""Every length up to 32, for modules that treat some of them in another way."""

VALUES = [(99, -9, 0, 2), (2, -1, 0, 3), (2, 0, 1, 3)]
"""Values of columns, item by item: a module may take fewer of them, or no negative ones."""

ENTERED = 8
"""Rows of the shortest item above that has entries in all outputs."""

FEW_IDS = 2
"""Number of integers in calls where these come again: a module may compare those of items."""

FEW_ITEMS = 16
"""Inputs that a batch of the proof has at least: modules may see those of a batch in groups of 8 or 16."""

FEW_ROWS = 512
"""Largest budget in rows for which an eager run of twice its rows is cheap."""


def small_layouts(spec: BufferSpec, budget: Budget) -> Iterator[Layout]:
    """Yield layouts of a few small items that leave padding in a budget, then any that it holds."""
    layouts = [_layout(spec, sizes) for sizes in SMALL]
    fitting = [layout for layout in layouts if _fits(spec, layout, budget)]
    yield from (layout for layout in fitting if layout.size < budget.rows)
    yield from (layout for layout in fitting if layout.size >= budget.rows)
    yield sample_layout(spec.layout, budget, spec.needs.windows)


def mixed_layouts(spec: BufferSpec, budget: Budget) -> Iterator[Layout]:
    """Yield layouts of several kinds of items that a budget holds, the richest first."""
    for sizes in (RICH[0], *MIXED):
        if spec.layout.has_frames or all(frames == 1 for frames, _ in sizes):
            yield from (layout for layout in _varied(spec, sizes) if _fits(spec, layout, budget))
    yield from small_layouts(spec, budget)


def rich_layouts(spec: BufferSpec, largest: Budget) -> Iterator[Layout]:
    """Yield layouts that no budget needs to hold, of several items each, the richest first.

    The others have more rows than the largest budget has if these are few. A batch is as large as its largest budget.
    """
    if spec.layout.one_row:
        yield _layout(spec, [(1, 1)] * max(largest.items, FEW_ITEMS))
    times = 1 + 2 * largest.rows // 20 if largest.rows <= FEW_ROWS else 1
    for sizes in (*RICH, MIXED[1] * (1 + times // 5), [(1, 12), (1, 8)] * times):
        yield from _varied(spec, sizes if spec.layout.has_frames else [(1, rows) for _, rows in sizes])


def crowded_layouts(spec: BufferSpec) -> Iterator[Layout]:
    """Yield layouts of many small items, of all lengths if the module takes them; none where each item is one row."""
    if not spec.layout.one_row:
        if not (spec.layout.has_frames or spec.layout.has_sides) and spec.row_multiple == 1:
            yield from _varied(spec, LENGTHS)
        yield from _varied(spec, CROWD)


def even_layouts(spec: BufferSpec) -> Iterator[Layout]:
    """Yield layouts of items of one size, which fill a padded batch."""
    yield from _varied(spec, [(1, 1 if spec.layout.one_row else 24)] * 3)


def edge_layouts(spec: BufferSpec, budget: Budget) -> Iterator[Layout]:
    """Yield layouts at the edges of a budget: of few items and rows, of all its items, of all its rows.

    Also one of more frames, and one of a longer item, than the budget holds if the declaration counts them.
    """
    edges = [*EDGES, [(1, 1)] * budget.items, [(1, budget.max_seqlen + spec.row_multiple)]]
    edges += [[(budget.segments + 1, 1)]] * spec.layout.has_frames
    layouts = [_layout(spec, sizes) for sizes in edges]
    layouts.append(sample_layout(spec.layout, budget, spec.needs.windows))
    yield from (layout for layout in layouts if _fits(spec, layout, budget))


def longest_layouts(spec: BufferSpec, budget: Budget) -> Iterator[Layout]:
    """Yield one item as long as a budget holds if attention masks are declared: short ones show no window."""
    layout = _layout(spec, [(1, budget.max_seqlen // spec.row_multiple * spec.row_multiple)])
    if any(isinstance(buffer, AttentionMask) for buffer in spec.buffers) and _fits(spec, layout, budget):
        yield layout


def _varied(spec: BufferSpec, sizes: Sizes) -> Iterator[Layout]:
    """Yield items with several values in each column, then with those of items without any."""
    if spec.layout.columns:
        yield from (_layout(spec, sizes, values) for values in VALUES)
    yield _layout(spec, sizes)


def _layout(spec: BufferSpec, sizes: Sizes, values: Sequence[int] = ()) -> Layout:
    """Return items of these sizes, every other one turned on its side; without values, columns hold their defaults.

    They are longer where items of a few rows have no entries in some output, and, but for the first, uneven where these
    are counted: functions that differ may agree on round numbers.
    """
    scale = max(1, spec.shortest / ENTERED)
    unit, items, columns = spec.row_multiple, [], spec.layout.columns
    for at, (frames, rows) in enumerate(sizes):
        if spec.counts_rows and at:
            rows = max(1, rows - at % 4)
        _, h, w, *_ = sample_item(spec.layout, max(1, round(rows * scale / unit)) * unit, spec.layout.merge)
        own = [column.pad if column.default is None else column.default for column in columns]
        if values:
            own = [values[(at + place) % len(values)] for place in range(len(columns))]
        begins = [int(at % 3 != 2)] * spec.layout.grouped  # two of three items begin a group
        sides = (w, h) if spec.layout.has_sides and at % 2 else (h, w)
        items.append((frames, *sides, *own, *begins))
    length = max(t * h * w for t, h, w, *_ in items) if spec.layout.padded else 0
    return Layout(tuple(items), length, spec.layout.grouped)


def _fits(spec: BufferSpec, layout: Layout, budget: Budget) -> bool:
    return budget.holds(*spec.needs.load(layout))


def make_calls(forward: Forward, layout: Layout, inputs: CaptureInputs, repeat: bool = False) -> Iterator[Call]:
    """Yield calls of these items as a user makes them, with all arguments by name.

    The first has random tensors. If some are integers, another one has their declared pads in all entries. With
    `repeat`, integers of the first are few, which come again in every item.
    """
    yield _call(forward, layout, inputs, _repeated if repeat else _random)
    if has_integers(forward):
        yield _call(forward, layout, inputs, _pads)


def has_integers(forward: Forward) -> bool:
    """Return True if the rows, or tensors beside them, are integers."""
    dtypes = [forward.row_dtype, *map(forward.input_dtype, forward.spec.inputs)]
    return not all(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)


def _call(forward: Forward, layout: Layout, inputs: CaptureInputs, make: "_Make") -> Call:
    spec, packed = forward.spec, forward.spec.packed
    statics, row_shape, device = inputs
    span, length = Span.of(layout), layout.longest
    padded = tuple(map(max, zip(*[item[1:3] for item in layout.items], strict=True)))
    padded = padded if spec.layout.pictures else (length,)

    def entries(extent: Extent, shape: Sequence[int], dtype: torch.dtype, ids: range, pad: float, at: int) -> Tensor:
        """Return entries as a call brings them: a batch to pack is still padded; past the end of texts are pads."""
        made = make([*extent.size(span), *shape], prod(shape), dtype, ids, pad, device, at)
        if extent.gaps and (spec.layout.clean_padding or not (dtype.is_floating_point or dtype.is_complex)):
            made = filled(made, ~real_rows(torch.tensor(layout.rows, device=device), length), pad)
        pads = spec.packs and extent is spec.row_extent
        return spec.of_batch(pad_rows(made, item_sizes(layout, padded), padded)) if pads else made

    tensors = {}
    for at, (one, extent) in enumerate(spec.input_extents, start=1):
        dtype = forward.input_dtype(one)
        tensors[one.name] = entries(extent, one.shape, dtype, valid_ids(forward, one.pad, dtype), one.pad, at)
    ids = valid_ids(forward, packed.pad, forward.row_dtype, packed.normalize is not None)
    rows = entries(spec.row_extent, row_shape, forward.row_dtype, ids, packed.pad, 0)
    description = _describe(spec, layout, device)
    if spec.mask is not None:
        is_real = real_rows(torch.tensor(layout.rows, device=device), length)
        description[spec.mask.name] = key_padding_mask(is_real, torch.bool, spec.mask.real)
    given = {name: description[name] for name in spec.describing if description[name] is not None}
    original = {packed.name: packed.as_argument(rows), **given, **statics}
    original |= {one.name: one.as_argument(tensors[one.name]) for one in spec.inputs}
    return Call(rows, description, dict(statics), spec.key(statics, row_shape), original, None, inputs=tensors)


def _describe(spec: BufferSpec, layout: Layout, device: torch.device) -> dict[str, Any]:
    """Return the arguments that describe the items."""
    table = torch.tensor(layout.items, device=device)
    description: dict[str, Any] = {spec.layout.name: range(len(layout))}
    if spec.layout.has_argument:
        description[spec.layout.name] = spec.layout.argument(table, spec.exact_budget(layout))
    for at, column in enumerate(spec.layout.columns, start=3):
        if column.function is None:
            values = [item[at] for item in layout.items]
            nested = [[values[i] for i in group] for group in layout.groups]
            missing = len(nested) == len(values) and set(values) == {column.default}
            given = nested if column.groups else table[:, at]
            description[column.name] = None if missing else given
    return description


_Make = Callable[[Sequence[int], int, torch.dtype, range, float, torch.device, int], Tensor]
"""Makes a tensor of a shape, with entries of so many numbers: its dtype, valid integers, pad, device, and a seed."""


def _pads(
    shape: Sequence[int], width: int, dtype: torch.dtype, ids: range, pad: float, device: torch.device, seed: int
) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return _random(shape, width, dtype, ids, pad, device, seed)
    return torch.full([*shape], pad, dtype=dtype, device=device)


def _repeated(
    shape: Sequence[int], width: int, dtype: torch.dtype, ids: range, pad: float, device: torch.device, seed: int
) -> Tensor:
    """Return integers of which few differ; other entries are random."""
    if dtype.is_floating_point or dtype.is_complex or not shape:
        return _random(shape, width, dtype, ids, pad, device, seed)
    middle = max(0, min(len(ids) // 2, len(ids) - FEW_IDS))  # ids at both ends may be special tokens
    few = torch.tensor([*ids[middle : middle + FEW_IDS]], device=device)
    return few[torch.arange(prod(shape), device=device) % len(few)].view([*shape]).to(dtype)


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
