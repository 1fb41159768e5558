"""Calls of given items, made of the rows of a call, or of random numbers where there is none."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.call import Call
from varlen_graphs.declaration.reading import read_layout
from varlen_graphs.graphs.capturer import CaptureInputs
from varlen_graphs.graphs.first_run import valid_ids
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.layouts.items import Layout
from varlen_graphs.layouts.packed_batch import item_sizes, pad_rows
from varlen_graphs.layouts.padded import key_padding_mask, real_rows
from varlen_graphs.layouts.span import Span
from varlen_graphs.outputs.entries import Extent, Items, filled

Kind = Literal["plain", "repeated", "uneven"]
"""Kind of the numbers in synthetic rows, see `SyntheticCalls.of`."""

Numbers = Literal["of the call", "normal", "between 0 and 1", "above 1"]
"""Range of the numbers: those of a call, or random ones. Modules that take logarithms or roots need positive ones."""

FEW_IDS = 2
"""Number of integers in calls where these come again: a module may compare those of items."""

MANY_IDS = 16
"""Number of integers that a call has at least where they show enough."""

GOLDEN = 0.618034
"""Multiples of it are spread evenly between integers."""


class _Tensor(NamedTuple):
    """Form of a tensor to make: its extent, the shape and dtype of an entry, valid integers, pad, and its number."""

    name: str
    extent: Extent
    shape: Sequence[int]
    dtype: torch.dtype
    ids: range
    pad: float
    number: int

    @property
    def floating(self) -> bool:
        """True if it does not hold integers or flags."""
        return self.dtype.is_floating_point or self.dtype.is_complex


class SyntheticCalls:
    """Makes calls of given items as a user makes them, with all arguments by name.

    Args:
        forward: The forward.
        inputs: The static arguments, the shape of rows, and the device.
        call: The call to take rows from; `None` if there is none.

    Attributes:
        numbers: Ranges of numbers to try, the most plausible first.
    """

    def __init__(self, forward: Forward, inputs: CaptureInputs, call: Call | None) -> None:
        spec, packed = forward.spec, forward.spec.packed
        self._spec, self._inputs = spec, inputs
        ids = valid_ids(forward, packed.pad, forward.row_dtype, packed.normalize is not None)
        rows = _Tensor(packed.name, spec.row_extent, inputs.row_shape, forward.row_dtype, ids, packed.pad, 0)
        self._tensors = [rows]
        for at, (one, extent) in enumerate(spec.input_extents, start=1):
            dtype = forward.input_dtype(one)
            ids = valid_ids(forward, one.pad, dtype)
            self._tensors.append(_Tensor(one.name, extent, one.shape, dtype, ids, one.pad, at))
        self.numbers: list[Numbers] = ["normal"]
        if any(one.dtype.is_floating_point for one in self._tensors):
            self.numbers += ["between 0 and 1", "above 1"]
        self._call: Call | None = None
        self._source: dict[str, Tensor] = {}
        if call is not None:
            self._take(replace(call))

    def _take(self, call: Call) -> None:
        """Take the entries of a call: those of real rows, if they show something."""
        layout = read_layout(self._spec, call)
        for one in self._tensors:
            tensor = call.inputs.get(one.name) if one.number else call.rows
            if tensor is None:
                continue
            tensor = tensor.detach().to(self._inputs.device, one.dtype)
            if one.floating and one.dtype.itemsize < 4:
                tensor = tensor.float()  # torch lacks operators for some dtypes
            if one.extent.gaps:
                tensor = tensor[real_rows(torch.tensor(layout.rows, device=tensor.device), tensor.shape[1])]
            if not one.number and one.floating and bool((tensor == tensor[:1]).all()):
                tensor = tensor[:1]
            ids = not (one.floating or one.number or one.dtype in (torch.bool, torch.uint8))
            if bool(tensor.any()) if one.floating else not ids or len(tensor.unique()) >= MANY_IDS:
                self._source[one.name] = tensor
        self._call = call
        self.numbers = ["of the call", *self.numbers[:1]]

    def integers(self) -> bool:
        """Return True if the rows, or tensors beside them, are integers."""
        return not all(one.floating for one in self._tensors)

    def of(self, layout: Layout, kind: Kind = "plain", numbers: Numbers = "normal") -> Iterator[Call]:
        """Yield calls of these items. If some tensors are integers, another one has their declared pads in all entries.

        Args:
            layout: The items.
            kind: If `"repeated"`, integers of the first call are few, which come again in every item. If `"uneven"`,
                rows are larger in the first third of the items than in others, and half of the items consist of one
                row.
            numbers: Range of the numbers.
        """
        yield self._make(layout, kind, numbers, pads=False)
        if self.integers():
            yield self._make(layout, kind, numbers, pads=True)

    def _make(self, layout: Layout, kind: Kind, numbers: Numbers, pads: bool) -> Call:
        spec, packed = self._spec, self._spec.packed
        statics, row_shape, device = self._inputs
        made = {one.name: self._entries(one, layout, kind, numbers, pads) for one in self._tensors}
        rows = made.pop(packed.name)
        description = _describe(spec, layout, device)
        if spec.mask is not None:
            is_real = real_rows(torch.tensor(layout.rows, device=device), layout.longest)
            description[spec.mask.name] = key_padding_mask(is_real, torch.bool, spec.mask.real)
        given = {name: description[name] for name in spec.describing if description[name] is not None}
        original = {packed.name: packed.as_argument(rows), **given, **statics}
        original |= {one.name: one.as_argument(made[one.name]) for one in spec.inputs}
        return Call(rows, description, dict(statics), spec.key(statics, row_shape), original, None, inputs=made)

    def _entries(self, one: _Tensor, layout: Layout, kind: Kind, numbers: Numbers, pads: bool) -> Tensor:
        """Return entries as a call brings them: a batch to pack is still padded; past the end of texts are pads."""
        spec, extent = self._spec, one.extent
        shape = [*extent.size(Span.of(layout)), *one.shape]
        if pads and not one.floating:
            made = torch.full(shape, one.pad, dtype=one.dtype, device=self._inputs.device)
        elif kind == "repeated" and not one.floating and shape:
            made = _repeated(one, shape, self._inputs.device)
        elif numbers == "of the call" and one.name in self._source:
            made = self._of_call(one, layout, shape)
        else:
            made = _random(one, shape, self._inputs.device)
            if one.dtype.is_floating_point:
                made = _moved(made.float(), numbers).to(one.dtype)
        is_rows = one.number == 0
        if kind == "uneven" and is_rows and (one.floating or spec.packed.normalize or one.dtype == torch.uint8):
            made = _uneven(made, layout)
        if extent.gaps and (spec.layout.clean_padding or not one.floating):
            made = filled(made, ~real_rows(torch.tensor(layout.rows, device=made.device), layout.longest), one.pad)
        if not (spec.packs and extent is spec.row_extent):
            return made
        padded = tuple(map(max, zip(*[item[1:3] for item in layout.items], strict=True)))
        padded = padded if spec.layout.pictures else (layout.longest,)
        return spec.of_batch(pad_rows(made, item_sizes(layout, padded), padded))

    def _of_call(self, one: _Tensor, layout: Layout, shape: Sequence[int]) -> Tensor:
        """Return entries of the call: those of an item from the first one of an item there on.

        Where they come again, the numbers of a row are others: turned, and smaller.
        """
        source, call = self._source[one.name], self._call
        if not one.extent.dims:
            return source.to(one.dtype)
        assert call is not None  # noqa: S101 - entries are those of a call
        assert call.layout is not None  # noqa: S101 - its items were read
        by_item = isinstance(one.extent, Items)
        own = torch.tensor([1] * len(call.layout) if by_item else call.layout.rows, device="cpu")
        counts = [1] * len(layout) if by_item else [layout.length] * len(layout) if one.extent.gaps else layout.rows
        starts, count = own.cumsum(0) - own, torch.tensor(counts, device="cpu")
        item = torch.arange(len(count), device="cpu").repeat_interleave(count)
        row = torch.arange(len(item), device="cpu") - (count.cumsum(0) - count)[item]
        place = starts[item % len(starts)] + row
        times = (item // len(starts) + place // len(source)).to(source.device)
        taken = source[(place % len(source)).to(source.device)]
        if one.number == 0 and one.shape and (one.floating or one.dtype == torch.uint8):
            flat = taken.flatten(1)
            turned = (torch.arange(flat.shape[1], device=flat.device) + times[:, None]) % flat.shape[1]
            taken = flat.gather(1, turned).view(taken.shape)
            if one.floating:
                taken = taken * (1 - times * GOLDEN % 1 / 2).view(-1, *[1] * len(one.shape))
        return taken.view(*shape).to(one.dtype)


def _moved(normal: Tensor, numbers: Numbers) -> Tensor:
    """Return normally distributed numbers, moved into a range."""
    if numbers == "above 1":
        return normal.abs() + 1.0625
    between: Tensor = torch.special.ndtr(normal)
    return between * 0.9 + 0.05 if numbers == "between 0 and 1" else normal


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


def _repeated(one: _Tensor, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return integers of which few differ."""
    middle = max(0, min(len(one.ids) // 2, len(one.ids) - FEW_IDS))  # ids at both ends may be special tokens
    few = torch.tensor([*one.ids[middle : middle + FEW_IDS]], device=device)
    return few[torch.arange(prod(shape), device=device) % len(few)].view([*shape]).to(one.dtype)


def _random(one: _Tensor, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return random entries in the dtype that calls bring; leaves the default generator alone."""
    generator, ids = torch.Generator(device).manual_seed(one.number), one.ids
    if one.floating:
        drawn = torch.complex64 if one.dtype.is_complex else torch.float32
        return torch.randn([*shape], generator=generator, device=device, dtype=drawn).to(one.dtype)
    if prod(one.shape) > 1:
        return torch.randint(ids.start, ids.stop, tuple(shape), generator=generator, device=device).to(one.dtype)
    order = torch.randperm(len(ids), generator=generator, device=device)  # as few equal entries as possible
    return (ids.start + order[torch.arange(prod(shape), device=device) % len(order)]).view([*shape]).to(one.dtype)
