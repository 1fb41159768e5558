"""Calls with made-up items and random rows, for the proof of new graphs."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from varlen_graphs.graphs.capturer import CaptureInputs
from varlen_graphs.graphs.first_run import valid_ids
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.layout.items import Layout
from varlen_graphs.layout.packed_batch import item_sizes, pad_rows
from varlen_graphs.layout.padded import key_padding_mask, real_rows
from varlen_graphs.layout.span import Span
from varlen_graphs.spec.buffer_spec import BufferSpec
from varlen_graphs.spec.call import Call
from varlen_graphs.spec.entries import Extent, filled

Kind = Literal["random", "repeated", "uneven"]
"""Kind of the numbers in made-up rows, see `make_calls`."""

Numbers = Literal["normal", "between 0 and 1", "above 1"]
"""Range of random floating numbers: modules that take logarithms or roots need positive ones."""

FEW_IDS = 2
"""Number of integers in calls where these come again: a module may compare those of items."""


def make_calls(
    forward: Forward, layout: Layout, inputs: CaptureInputs, kind: Kind = "random", numbers: Numbers = "normal"
) -> Iterator[Call]:
    """Yield calls of these items as a user makes them, with all arguments by name.

    The first has random tensors. If some are integers, another one has their declared pads in all entries.

    Args:
        forward: The forward.
        layout: The items.
        inputs: The static arguments, the shape of rows, and the device.
        kind: If `"repeated"`, integers of the first call are few, which come again in every item. If `"uneven"`, rows
            are larger in the first third of the items than in others, and half of the items consist of one row.
        numbers: Range of floating numbers.
    """
    make = partial(_call, forward, layout, inputs, numbers=numbers, uneven=kind == "uneven")
    yield make(_repeated if kind == "repeated" else _random)
    if has_integers(forward):
        yield make(_pads)


def has_integers(forward: Forward) -> bool:
    """Return True if the rows, or tensors beside them, are integers."""
    return not all(dtype.is_floating_point or dtype.is_complex for dtype in _dtypes(forward))


def has_floats(forward: Forward) -> bool:
    """Return True if the rows, or tensors beside them, are floating."""
    return any(dtype.is_floating_point for dtype in _dtypes(forward))


def _dtypes(forward: Forward) -> list[torch.dtype]:
    return [forward.row_dtype, *map(forward.input_dtype, forward.spec.inputs)]


def _moved(normal: Tensor, numbers: Numbers) -> Tensor:
    """Return normally distributed numbers, moved into a range."""
    if numbers == "normal":
        return normal
    if numbers == "above 1":
        return normal.abs() + 1.0625
    between: Tensor = torch.special.ndtr(normal)
    return between * 0.9 + 0.05


def _call(
    forward: Forward,
    layout: Layout,
    inputs: CaptureInputs,
    make: "_Make",
    numbers: Numbers,
    uneven: bool,
) -> Call:
    spec, packed = forward.spec, forward.spec.packed
    statics, row_shape, device = inputs
    span, length = Span.of(layout), layout.longest
    padded = tuple(map(max, zip(*[item[1:3] for item in layout.items], strict=True)))
    padded = padded if spec.layout.pictures else (length,)

    def entries(extent: Extent, shape: Sequence[int], dtype: torch.dtype, ids: range, pad: float, at: int) -> Tensor:
        """Return entries as a call brings them: a batch to pack is still padded; past the end of texts are pads."""
        made = make([*extent.size(span), *shape], prod(shape), dtype, ids, pad, device, at)
        if dtype.is_floating_point:
            made = _moved(made.float(), numbers).to(dtype)
        if uneven and at == 0 and (dtype.is_floating_point or packed.normalize or dtype == torch.uint8):
            made = _uneven(made, layout)
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


def _uneven(rows: Tensor, layout: Layout) -> Tensor:
    """Return rows 4 times as large in the first third of the items, an eighth in others; half of them are one row.

    Modules may share among items what follows from the largest number, or the places that many equal rows compete for.
    """
    item = torch.arange(len(layout), device="cpu")
    if not layout.length:  # packed
        item = item.repeat_interleave(torch.tensor(layout.rows, device="cpu"))
    item = item.to(rows.device).view(-1, *[1] * (rows.dim() - 1))
    scale = torch.where(item < len(layout) // 3, 4.0, 0.125) / (1 if rows.is_floating_point() else 4)
    wide = rows.float()  # torch lacks operators for some dtypes
    return (torch.where(item % 2 == 1, wide[:1, :1] if layout.length else wide[:1], wide) * scale).to(rows.dtype)


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
