"""Declarations of modules, recognised by the values that modules compute of their items."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.buffers import (
    AttentionMask,
    Buffer,
    CuSeqlens,
    GridPositions,
    Interpolation,
    MaxSeqlen,
    RotaryTable,
    RowPositions,
    WindowIndex,
)
from varlen_graphs.doctor.example_call import ExampleCall
from varlen_graphs.inputs.extra import Input, PerCall, PerItem, PerRow
from varlen_graphs.kernels.interpolation.reference import Mode
from varlen_graphs.layouts.arguments import LayoutArgument
from varlen_graphs.layouts.grids import GridHW, GridTHW
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.items import Layout, Order
from varlen_graphs.layouts.lengths import Lengths
from varlen_graphs.layouts.mask import Mask
from varlen_graphs.layouts.segments import Per, Windows, segments_of
from varlen_graphs.outputs.declared import Fields, extents
from varlen_graphs.outputs.entries import Extent, Items, Rows
from varlen_graphs.torch_dispatch.thread_modes import RunMode, run_under

SIDES = range(2, 9)
"""Sides of windows to look for."""

MOST_FREQUENCIES = 512
"""Entries of a vector that may be frequencies of a rotary embedding."""

_MODES: tuple[Mode, ...] = ("bilinear", "bicubic")

IN_THE_PACKAGE = (GridTHW, Lengths, Mask)
"""Layouts that `varlen_graphs` has itself; all others are in `varlen_graphs.layouts`."""

Value = Tensor | int


class Recognised(NamedTuple):
    """Parts of a declaration to paste.

    Attributes:
        layout: The layout argument; `None` if there is none.
        buffers, inputs: Those that were recognised.
        outputs: Declaration of the outputs; `None` if it does not follow from their sizes.
    """

    layout: LayoutArgument | None
    buffers: list[Buffer]
    inputs: list[Input]
    outputs: Extent | Fields | None


def recognise(
    module: nn.Module, examples: Sequence[ExampleCall], rows: str, name: str, layout: LayoutArgument
) -> Recognised:
    """Return the parts of a declaration, found by running a module on its calls, which it may write to.

    Each kind of buffer is computed for the items of each call, and compared with every tensor and number that the
    module computes on its way.

    Args:
        module: The module.
        examples: Its calls.
        rows: Name of the argument that holds the rows.
        name: Name of the argument that describes the items.
        layout: How that may be declared.

    Raises:
        Exception: That of the module, or of items that are not those of the rows.
    """
    calls = []
    for example in examples:
        given = example.named(module)
        items = Layout(tuple(layout.parse(given[name])))
        layout.check_rows(items, given[rows].shape, rows)
        output = _run(module, example, _Seen({}))  # under a mode, encoders inside run eager
        calls.append(_Observed(example, given, given[rows].shape, items, output))
    outputs = _outputs(calls, layout)
    merge = _merge(outputs, calls, layout)
    if merge > 1:
        layout = dataclasses.replace(layout, merge=merge)  # type: ignore[type-var]  # a grid
    candidates = [*_candidates(module, layout)]
    for call in calls:
        wanted = {at: _produced(one, call, layout, module) for at, one in enumerate(candidates)}
        seen = _Seen({at: values for at, values in wanted.items() if values})
        _run(module, call.example, seen)
        candidates = [one for at, one in enumerate(candidates) if at in seen.found]
    found = _distinct(candidates, calls, layout, module)
    attends = {one.per for one in found if isinstance(one, CuSeqlens)}
    if any(isinstance(one, RotaryTable) for one in found):  # positions are on the way to it
        found = [one for one in found if not isinstance(one, GridPositions)]
    found = [
        one for one in found if not isinstance(one, MaxSeqlen) or one.per in attends or _varies(one, calls, layout)
    ]
    others = [other for other in calls[0].given if other not in (rows, name)]
    inputs = [one for other in others if (one := _input(other, calls, layout)) is not None]
    return Recognised(layout, found, inputs, outputs)


class _Observed(NamedTuple):
    """A call: its arguments by name, the shape of its rows, its items and its output."""

    example: ExampleCall
    given: Mapping[str, Any]
    shape: torch.Size
    items: Layout
    output: Any


def _run(module: nn.Module, example: ExampleCall, mode: RunMode) -> Any:
    own = example.copied(example.device)
    with torch.no_grad():
        return run_under(partial(module, *own.args, **own.kwargs), mode)


class _Seen(RunMode):
    """Looks for values among the tensors that operators return, and the numbers that they take.

    Attributes:
        found: The keys of those that were seen.
    """

    def __init__(self, wanted: Mapping[int, list[Value]]) -> None:
        super().__init__()
        self._wanted = dict(wanted)
        self.found: set[int] = set()

    def run_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and return its result."""
        result = func(*args, **kwargs)
        numbers = {leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is int}
        tensors = [leaf.squeeze() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for key, values in [*self._wanted.items()]:
            values = [value for value in values if not any(_is(value, tensor) for tensor in tensors)]
            values = [value for value in values if not (isinstance(value, int) and value in numbers)]
            self._wanted[key] = values
            if not values:
                self.found.add(key)
                del self._wanted[key]
        return result


def _is(value: Value, tensor: Tensor) -> bool:
    """Return True if a tensor holds a value, in any dtype of its kind."""
    if isinstance(value, int):
        return tensor.dim() == 0 and not tensor.is_floating_point() and tensor.item() == value
    if tensor.is_floating_point() != value.is_floating_point():
        return False
    if value.dim() == tensor.dim() and value.shape[-1] == 2 * tensor.shape[-1]:  # rotary tables have all angles twice
        first, second = value.chunk(2, -1)
        value = first if torch.equal(first, second) else value
    if tensor.shape != value.shape:
        return False
    if not value.is_floating_point():
        return torch.equal(tensor.to(torch.int64), value.to(torch.int64))
    rounding = max(1e-3, 4 * torch.finfo(tensor.dtype).eps)
    return torch.allclose(tensor.float(), value.float(), rtol=rounding, atol=rounding / 10)


def _candidates(module: nn.Module, layout: LayoutArgument) -> Iterator[Buffer]:
    """Yield the buffers that a module may compute by itself, the plainest of each kind first."""
    if layout.padded:
        for causal, dtype in product((False, True), (torch.bool, None)):
            yield AttentionMask("mask", causal=causal, dtype=dtype)
        return
    grid = isinstance(layout, GridTHW | GridHW)
    kinds: tuple[Per, ...] = ("frame", "item") if isinstance(layout, GridTHW) else ("item",)
    yield from (CuSeqlens(per=per) for per in kinds)
    yield from (MaxSeqlen(per=per) for per in kinds)
    if not grid:
        yield RowPositions()
        return
    for side in SIDES:
        windows = Windows(side)
        yield WindowIndex(windows)
        yield CuSeqlens("cu_window_seqlens", per=windows)
        yield MaxSeqlen("max_window_seqlen", per=windows)
    orders: tuple[Order, ...] = ("raster", "merge_block") if layout.merge > 1 else ("raster",)
    for order in orders:
        yield GridPositions(order=order)
    for path, tensor in module.named_buffers():
        if tensor.dim() == 1 and 1 < len(tensor) <= MOST_FREQUENCIES and tensor.is_floating_point():
            yield from (RotaryTable(inv_freq=path, order=order) for order in orders)
    for path in _tables(module):
        for mode, corners, order in product(_MODES, (False, True), orders):
            yield Interpolation(table=path, mode=mode, align_corners=corners, order=order)
        yield from (Interpolation(table=path, order=order, antialias=True) for order in orders)


def _tables(module: nn.Module) -> Iterator[str]:
    """Yield the paths of square tables: of matrices, those that are no weights of products."""
    for start, part in module.named_modules():
        own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        for name, tensor in () if isinstance(part, nn.Linear) else own:
            if tensor.dim() == 2 and len(tensor) > 1 and math.isqrt(len(tensor)) ** 2 == len(tensor):
                yield f"{start}.{name}".lstrip(".")


def _produced(buffer: Buffer, call: _Observed, layout: LayoutArgument, module: nn.Module) -> list[Value]:
    """Return the values of a buffer for the items of a call, without any padding; empty if it has none."""
    items = call.items.items
    per: Per = buffer.per if isinstance(buffer, CuSeqlens | MaxSeqlen) else "item"
    segments = [segments_of(item, per, layout.merge) for item in items]
    longest = max(longest for _, longest in segments)
    if isinstance(buffer, MaxSeqlen):
        return [longest]
    budget = Budget(call.items.total, len(items), sum(count for count, _ in segments), longest)
    if layout.padded:
        budget = Budget.padded(*call.shape[:2])
    table = ItemTable(torch.tensor(items, dtype=torch.int64, device=call.example.device), budget, layout)
    try:
        made = [leaf.squeeze() for leaf in tree_leaves(buffer.produce(table, module)) if isinstance(leaf, Tensor)]
    except Exception:  # it does not suit these items
        return []
    return [*made] if all(one.dim() for one in made) else []  # those of a single number are seen by chance


def _distinct(
    candidates: Sequence[Buffer], calls: Sequence[_Observed], layout: LayoutArgument, module: nn.Module
) -> list[Buffer]:
    """Return the candidates without those whose values are those of one before, in all calls."""
    found: list[Buffer] = []
    known: list[list[list[Value]]] = []
    for one in candidates:
        values = [_produced(one, call, layout, module) for call in calls]
        if isinstance(one, WindowIndex) and all(_counts(value) for own in values for value in own):
            continue  # no window moves a row, and any count of rows is the same
        tells = any(_tells(value) for own in values for value in own)
        if tells and not any(_same(values, other) for other in known):
            found.append(one)
            known.append(values)
    return found


def _varies(buffer: MaxSeqlen, calls: Sequence[_Observed], layout: LayoutArgument) -> bool:
    """Return True if the longest segment differs between calls: else any number may be the same by chance."""
    return len({max(segments_of(item, buffer.per, layout.merge)[1] for item in one.items.items) for one in calls}) > 1


def _tells(value: Value) -> bool:
    """Return True unless all numbers of a tensor are the same, as they may be by chance."""
    return isinstance(value, int) or bool((value != value.flatten()[0]).any())


def _counts(value: Value) -> bool:
    return isinstance(value, Tensor) and torch.equal(value, torch.arange(len(value), device=value.device))


def _same(one: list[list[Value]], other: list[list[Value]]) -> bool:
    """Return True if two buffers have the same values in all calls."""
    if [len(values) for values in one] != [len(values) for values in other]:
        return False
    pairs = (pair for left, right in zip(one, other, strict=True) for pair in zip(left, right, strict=True))
    return all(_is(b, a) if isinstance(a, Tensor) else type(b) is int and a == b for a, b in pairs)


def _outputs(calls: Sequence[_Observed], layout: LayoutArgument) -> Extent | Fields | None:
    """Return the declaration of the outputs; `None` if it does not follow from their sizes."""
    outputs = [call.output for call in calls]
    if all(isinstance(output, Tensor) for output in outputs):
        return _extent([output.shape for output in outputs], calls, layout)
    fields = [_fields(output) for output in outputs]
    if not all(fields) or len({tuple(own) for own in fields}) > 1:
        return None
    shapes = {name: [own[name].shape for own in fields] for name in fields[0]}
    found = {name: extent for name, own in shapes.items() if (extent := _extent(own, calls, layout)) is not None}
    return Fields(**found) if len(found) == len(shapes) else None


def _fields(output: Any) -> dict[str, Tensor]:
    items = output.items() if isinstance(output, Mapping) else ()
    return {name: value for name, value in items if isinstance(value, Tensor)}


def _extent(shapes: Sequence[torch.Size], calls: Sequence[_Observed], layout: LayoutArgument) -> Extent | None:
    """Return the extent of outputs with these shapes, an entry for each row, for several, or for each item.

    `None` if none fits, or two do.
    """
    dim = int(layout.padded)
    rows = [call.shape[1] if layout.padded else call.items.total for call in calls]
    sizes = [shape[dim] if len(shape) > dim else 0 for shape in shapes]
    ratios = {count // size if size and count % size == 0 else 0 for count, size in zip(rows, sizes, strict=True)}
    of_items = all(shape[:1] == (len(call.items),) for shape, call in zip(shapes, calls, strict=True))
    of_rows = len(ratios) == 1 and min(ratios) > 0 and (of_items or not layout.padded)
    if of_items and of_rows and (len(shapes[0]) == 2 or not layout.padded):
        return None
    if of_rows:
        return Rows(every=min(ratios))
    return Items() if of_items else None


def _merge(outputs: Extent | Fields | None, calls: Sequence[_Observed], layout: LayoutArgument) -> int:
    """Return the side of the blocks of rows that outputs merge."""
    found = [] if outputs is None else extents(outputs)
    every = max((one.every for one in found if isinstance(one, Rows)), default=1)
    side = math.isqrt(every)
    whole = all(item[1] % side == 0 and item[2] % side == 0 for call in calls for item in call.items.items)
    return side if isinstance(layout, GridTHW | GridHW) and side * side == every and whole else 1


def _input(name: str, calls: Sequence[_Observed], layout: LayoutArgument) -> Input | None:
    """Return the declaration of a tensor that calls bring beside the rows; `None` if some do not, or as anything."""
    tensors = [one for call in calls if isinstance(one := call.given.get(name), Tensor)]
    if len(tensors) < len(calls):
        return None
    shapes = [one.shape for one in tensors]
    dtype = None if tensors[0].is_floating_point() else tensors[0].dtype
    dims = 2 if layout.padded else 1
    if all(shape[:dims] == call.shape[:dims] for shape, call in zip(shapes, calls, strict=True)):
        return PerRow(name, tuple(shapes[0][dims:]), dtype)
    if all(shape[:1] == (len(call.items),) for shape, call in zip(shapes, calls, strict=True)):
        return PerItem(name, tuple(shapes[0][1:]), dtype)
    return PerCall(name, tuple(shapes[0]), dtype) if len({*shapes}) == 1 else None


def pasted(part: Any) -> str:
    """Return a part of a declaration as code, with the arguments that are not the defaults."""
    kind = type(part).__name__
    if isinstance(part, Fields):
        return f"vg.outputs.Fields({', '.join(f'{name}={pasted(one)}' for name, one in part.fields.items())})"
    rooms: dict[str, Any] = {
        "vg.buffers": Buffer,
        "vg.inputs": Input,
        "vg.outputs": Extent,
        "vg": IN_THE_PACKAGE,
        "vg.layouts": LayoutArgument,
    }
    where = next(room for room, base in rooms.items() if isinstance(part, base))
    fields = [(one.name, getattr(part, one.name), one.default) for one in dataclasses.fields(part) if one.init]
    changed = [(name, value) for name, value, default in fields if value != default]
    named = isinstance(part, LayoutArgument) or any(name == "name" for name, _ in changed)
    first = [_code(part.name)] if named else []
    rest = [f"{name}={_code(value)}" for name, value in changed if name != "name"]
    return f"{where}.{kind}({', '.join([*first, *rest])})"


def _code(value: Any) -> str:
    if isinstance(value, Windows):
        return f"vg.layouts.Windows({value.side})"
    return f'"{value}"' if isinstance(value, str) else repr(value)
