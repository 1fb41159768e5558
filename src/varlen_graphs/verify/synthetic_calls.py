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
from varlen_graphs.graphs.first_run import valid_ids
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.graphs.graph_set import CaptureInputs
from varlen_graphs.layouts.item_slice import ItemSlice
from varlen_graphs.layouts.items import Layout
from varlen_graphs.layouts.packed_batch import item_sizes, pad_rows
from varlen_graphs.layouts.padded import key_padding_mask, real_rows
from varlen_graphs.outputs.entries import Extent, Items, filled

Kind = Literal["plain", "repeated", "uneven", "positive", "negative"]
"""Kind of the numbers in synthetic rows, see `SyntheticCalls.of`."""

FEW_IDS = 2
"""Number of integers in calls where these come again: a module may compare those of items."""

MANY_IDS = 16
"""Number of integers that a call has at least where they show enough."""

MOST_ENTRIES, MOST_NUMBERS = 1024, 1 << 20
"""Entries, and numbers in them, that are drawn at random for a tensor: they come again, numbers as others."""

FAR = 4.0
"""Distance from 0 of all numbers of one sign."""

STEP = 5
"""Rows by which items begin later each time that those of the call come again."""

GOLDEN = 0.618034
"""Multiples of it are spread evenly between integers."""


class _Tensor(NamedTuple):
    """Form of a tensor to make: its extent, the shape and dtype of an entry, valid integers, and its pad."""

    name: str
    extent: Extent
    shape: Sequence[int]
    dtype: torch.dtype
    ids: range
    pad: float

    @property
    def floating(self) -> bool:
        """True if it does not hold integers or flags."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def is_varied(self) -> bool:
        """True for numbers and pixels, which mean something in any place and size; not for ids."""
        return self.floating or (self.dtype == torch.uint8 and bool(self.shape))


class SyntheticCalls:
    """Makes calls of given items as a user makes them, with all arguments by name.

    Args:
        forward: The forward.
        inputs: The static arguments, the shape of rows, and the device.
        call: The call to take rows from; without one they are random.

    Attributes:
        has_integers: True if the rows, or tensors beside them, are integers.
    """

    def __init__(self, forward: Forward, inputs: CaptureInputs, call: Call | None) -> None:
        spec, packed = forward.spec, forward.spec.row_input
        self._spec, self._inputs = spec, inputs
        ids = valid_ids(forward, packed.pad, forward.row_dtype, packed.normalize is not None)
        self._tensors = [_Tensor(packed.name, spec.row_extent, inputs.row_shape, forward.row_dtype, ids, packed.pad)]
        for given, extent in spec.input_extents:
            dtype = forward.input_dtype(given)
            ids = valid_ids(forward, given.pad, dtype)
            self._tensors.append(_Tensor(given.name, extent, given.shape, dtype, ids, given.pad))
        self.has_integers = not all(one.floating for one in self._tensors)
        self._layout = None if call is None else read_layout(spec, call := replace(call))
        telling, valid, random = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
        for at, one in enumerate(self._tensors):
            taken = None if call is None else self._taken(one, call.inputs.get(one.name) if at else call.rows)
            random[one.name] = drawn = _random(one, at, inputs.device)
            telling[one.name] = drawn if taken is None or not _shows(one, taken, is_row=not at) else taken
            pad = drawn if one.floating else torch.full_like(drawn[:1] if one.extent.dims else drawn, one.pad)
            valid[one.name] = pad if taken is None else taken
        self._sources = [telling, valid] if self.has_integers else [telling]
        if call is not None and self._tensors[0].floating:  # whose outputs may be NaN
            self._sources.append(random)

    def _taken(self, one: _Tensor, tensor: Tensor | None) -> Tensor | None:
        """Return the entries of a tensor of the call, those of padding left out."""
        if tensor is None or self._layout is None:
            return None
        tensor = _wide(one, tensor.detach().to(self._inputs.device, one.dtype))
        if one.extent.gaps:
            tensor = tensor[real_rows(torch.tensor(self._layout.rows, device=tensor.device), tensor.shape[1])]
        return tensor

    def of(self, layout: Layout, kind: Kind = "plain") -> Iterator[Call]:
        """Yield calls of these items, the most telling one first.

        If some tensors are integers, one with valid integers follows, and one with random rows where there is a call.
        After numbers of one sign, of which a module may take no logarithm, plain ones follow.

        Args:
            layout: The items.
            kind: If `"repeated"`, integers are few, which come again in every item. If `"uneven"`, the first third of
                the items has larger numbers of both signs, and low integers; others have positive numbers, and high
                integers; and half of the items consist of one row. If `"positive"` or `"negative"`, all numbers have
                that sign, and are far from 0, as padding is not; integers are then high, and flags true.
        """
        if kind in ("positive", "negative"):
            yield self._make(layout, kind, self._sources[0], any_ids=True)
            kind = "plain"
        for at, source in enumerate(self._sources):
            yield self._make(layout, kind, source, any_ids=at == 0)

    def _make(self, layout: Layout, kind: Kind, source: dict[str, Tensor], any_ids: bool) -> Call:
        spec, packed = self._spec, self._spec.row_input
        static_args, row_shape, device = self._inputs
        made = {one.name: self._entries(one, layout, kind, source[one.name], any_ids) for one in self._tensors}
        rows = made.pop(packed.name)
        description = _describe(spec, layout, device)
        if spec.mask is not None:
            is_real = real_rows(torch.tensor(layout.rows, device=device), layout.longest)
            description[spec.mask.name] = key_padding_mask(is_real, torch.bool, spec.mask.real)
        given = {name: description[name] for name in spec.describing if description[name] is not None}
        original = {packed.name: packed.as_argument(rows), **given, **static_args}
        original |= {one.name: one.as_argument(made[one.name]) for one in spec.inputs}
        return Call(rows, description, dict(static_args), spec.key(static_args, row_shape), original, None, inputs=made)

    def _entries(self, one: _Tensor, layout: Layout, kind: Kind, source: Tensor, any_ids: bool) -> Tensor:
        """Return entries as a call brings them: a batch to pack is still padded; past the end of texts are pads."""
        spec, extent = self._spec, one.extent
        if not extent.dims:
            return source.to(one.dtype)
        if kind == "repeated" and not one.floating:
            source = source.flatten().unique()
            middle = max(0, min(len(source) // 2, len(source) - FEW_IDS))  # ids at both ends may be special tokens
            source = source[middle : middle + FEW_IDS].view(-1, *[1] * len(one.shape)).expand(-1, *one.shape)
        made = self._drawn(one, layout, source).to(one.dtype).view(*extent.size(ItemSlice.of(layout)), *one.shape)
        if kind == "uneven":
            made = self._uneven(one, made, layout, any_ids)
        if kind in ("positive", "negative"):
            made = self._one_sided(one, made, 1 if kind == "positive" else -1)
        if extent.gaps and (spec.layout.clean_padding or not one.floating):
            made = filled(made, ~real_rows(torch.tensor(layout.rows, device=made.device), layout.longest), one.pad)
        if not (spec.packs and extent is spec.row_extent):
            return made
        sizes = item_sizes(layout, spec.rows_form.padded_dims)
        return spec.rows_form.of_batch(pad_rows(made, sizes, [*map(max, zip(*sizes, strict=True))]))

    def _uneven(self, one: _Tensor, made: Tensor, layout: Layout, any_ids: bool) -> Tensor:
        """Return entries of which those of the first third of the items differ from the others, see `of`.

        Modules may share among items what follows from the largest number, from a flag of any, or the places that many
        equal rows compete for.
        """
        is_row = one is self._tensors[0]
        item = torch.arange(len(layout), device="cpu")
        if not (layout.length or isinstance(one.extent, Items)):  # packed
            item = item.repeat_interleave(torch.tensor(layout.rows, device="cpu"))
        item = item.to(made.device).view(-1, *[1] * (made.dim() - 1))
        first = item < len(layout) // 3
        if one.floating or (is_row and (self._spec.row_input.normalize or one.dtype == torch.uint8)):
            scale = 1 if one.floating else 0.25
            wide = made if one.dtype.is_complex else made.float()  # torch lacks operators for some dtypes
            if is_row:
                wide = torch.where(item % 2 == 1, wide[:1, :1] if layout.length else wide[:1], wide)
            return torch.where(first, wide * (4 * scale), wide.abs() * (0.125 * scale)).to(made.dtype)
        if not any_ids:  # the module may take no others
            return made
        inside = len(one.ids) // 8 if is_row else 0  # ids of texts at both ends may be special tokens
        low, high = one.ids[inside], one.ids[-1 - inside]
        return torch.where(first, low, high).to(made.dtype).expand_as(made).clone()

    @staticmethod
    def _one_sided(one: _Tensor, made: Tensor, sign: int) -> Tensor:
        """Return entries far from 0, on one side of it: modules may ask whether any or all are."""
        if one.dtype.is_complex:
            return made
        if one.floating:
            return (sign * (made.float().abs() + FAR)).to(made.dtype)
        if one.dtype == torch.bool:
            return torch.full_like(made, sign > 0)
        return made.clamp(min=one.ids[len(one.ids) // 2]) if sign > 0 else made

    def _drawn(self, one: _Tensor, layout: Layout, source: Tensor) -> Tensor:
        """Return entries one after the other: items begin as those of the call, with other numbers; ids end so, too."""
        by_item = isinstance(one.extent, Items)
        counts = [1] * len(layout) if by_item else [layout.length] * len(layout) if one.extent.gaps else layout.rows
        count = torch.tensor(counts, device="cpu")
        item = torch.arange(len(count), device="cpu").repeat_interleave(count)
        place, times = torch.arange(len(item), device="cpu"), torch.zeros_like(item)
        if self._layout is not None and not by_item:
            own = torch.tensor(self._layout.rows, device="cpu")
            place += (
                (own.cumsum(0) - own)[item % len(own)] - (count.cumsum(0) - count)[item] + STEP * (item // len(own))
            )
            times = item
            if not one.is_varied:  # a text may need its end
                lasts = count.cumsum(0) - count + torch.tensor(layout.rows, device="cpu") - 1
                place[lasts] = (own.cumsum(0) - 1)[torch.arange(len(lasts), device="cpu") % len(own)]
        times = (times + place // len(source)).to(source.device)
        taken = source[(place % len(source)).to(source.device)]
        if one.is_varied and one.shape:
            flat = taken.flatten(1)
            turned = (torch.arange(flat.shape[1], device=flat.device) + times[:, None]) % flat.shape[1]
            taken = flat.gather(1, turned)
        if one.is_varied:
            taken = taken * (1 - times * GOLDEN % 1 / 2).view(-1, *[1] * (taken.dim() - 1))
        return taken


def _shows(one: _Tensor, taken: Tensor, is_row: bool) -> bool:
    """Return True if entries differ enough to show what a module does with them."""
    if one.is_varied:
        entries = taken.reshape(-1, *one.shape)  # a tensor for the call is one entry
        differ = bool((entries != entries[:1]).any()) or (len(entries) == 1 and bool(entries.any()))
        most = torch.finfo(one.dtype).max ** 0.5 if one.floating else torch.inf  # squares of larger ones are infinite
        return differ and bool((entries.abs() < most).all())  # not of NaN either
    return not is_row or one.dtype in (torch.bool, torch.uint8) or len(taken.unique()) >= MANY_IDS


def _wide(one: _Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor in a dtype that torch has all operators for."""
    if one.floating:
        return tensor.float() if one.dtype.itemsize < 4 else tensor
    return tensor if one.dtype in (torch.bool, torch.uint8) else tensor.long()


def _random(one: _Tensor, seed: int, device: torch.device) -> Tensor:
    """Return random entries in the dtype that calls bring; leaves the default generator alone."""
    generator, ids = torch.Generator(device).manual_seed(seed), one.ids
    count = max(1, min(MOST_ENTRIES, MOST_NUMBERS // max(1, prod(one.shape))))
    shape = [*[count] * bool(one.extent.dims), *one.shape]
    if one.floating:
        drawn = torch.complex64 if one.dtype.is_complex else torch.float32
        return _wide(one, torch.randn(shape, generator=generator, device=device, dtype=drawn).to(one.dtype))
    if prod(one.shape) > 1 or not one.extent.dims:
        return torch.randint(ids.start, ids.stop, shape, generator=generator, device=device).to(one.dtype)
    order = torch.randperm(len(ids), generator=generator, device=device)  # as few equal entries as possible
    return (ids.start + order).view(-1, *one.shape).to(one.dtype)


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
