"""How far what a run gave is from what a call is to give, item by item."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from varlen_graphs.graphs.forward import Forward
from varlen_graphs.layout.items import Layout
from varlen_graphs.layout.padded import pack_rows
from varlen_graphs.layout.span import Span
from varlen_graphs.spec.entries import Rows
from varlen_graphs.spec.outputs import Parts, at, name_of

TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""How far outputs may be apart that were computed in these dtypes. TF32 rounds as float16 does."""

ONE_ROW = 8
"""How many times as far apart as all rows of an item together one of them may be, which rounding alone may bring."""

FEW = 8
"""How many items of a call a message names."""


class Difference(NamedTuple):
    """Where two outputs of a call are furthest apart.

    Attributes:
        error: Relative L2, or an eighth of that of the worst row, if it is larger; infinite where one of them is not
            finite, or of another shape.
        item: The item of the call.
        where: What it is, for messages.
    """

    error: float
    item: int
    where: str


class Expected:
    """What a call is to give.

    Args:
        output: The output of the module itself.
        layout: The items of the call.
        length: To how many rows the items of a batch were padded that the call packs; 0 where it does not.
    """

    def __init__(self, output: Any, layout: Layout, length: int = 0) -> None:
        self.output = output
        self._layout = layout
        self._length = length

    def differences(self, came: Parts, layout: Layout, items: Sequence[int], length: int = 0) -> list[Difference]:
        """How far what came of each item of a run is from this, in the worst of its tensors. Syncs with the device.

        An error is relative to the item's own output, or to what an item of its size has on average if that is larger:
        of outputs near zero nothing is left but rounding. Where both are not finite they are equal. Of items of many
        rows one wrong row alone would hardly count, so the worst row does, relative to what a row has on average.

        Args:
            came: What a run gave.
            layout: The items of the run.
            items: Which item of the call each item of the run is.
            length: As of `Expected`, of what came.
        """
        found = [Difference(0.0, item, "output") for item in items]
        own_spans, spans = _item_spans(self._layout), _item_spans(layout)
        for tensor, extent, path in zip(came.tensors, came.extents, came.paths, strict=True):
            right = at(self.output, path)
            errors = [torch.inf] * len(items)
            if isinstance(right, Tensor):
                if isinstance(extent, Rows):
                    right = pack_rows(right, self._layout.rows) if self._length else right
                    tensor = pack_rows(tensor, layout.rows) if length else tensor
                right_parts = [extent.part(right, own_spans[item]) for item in items]
                errors = _errors([extent.part(tensor, span) for span in spans], right_parts, extent.rows_dim)
            wheres = [f"{name_of(path)} of item {item}, {self._layout.items[item]}," for item in items]
            found = [max(pair) for pair in zip(found, map(Difference, errors, items, wheres), strict=True)]
        return found

    def furthest(self, came: Parts, layout: Layout, items: Sequence[int], length: int = 0) -> Difference:
        """The largest of the `differences`."""
        return max(self.differences(came, layout, items, length))

    def differs_from(self, other: "Expected", form: Parts) -> float:
        """The error of another output of the same call, in the tensors of a replay."""
        tensors = [at(other.output, path) for path in form.paths]
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            return 0.0  # for the comparison with the replay to tell
        parts = replace(form, tensors=tensors)
        return self.furthest(parts, self._layout, range(len(self._layout)), self._length).error


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values, NaN included. Syncs with the device."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    same = one == other
    if one.is_floating_point() or one.is_complex():
        same |= one.isnan() & other.isnan()
    return bool(same.all())


def close(one: Tensor, other: Tensor, limit: float) -> bool:
    """Whether floating tensors are within a relative L2; others are not compared. Syncs with the device."""
    return not one.is_floating_point() or _errors([one], [other])[0] <= limit


def limit_of(given: float | None, forward: Forward, device: torch.device) -> float:
    """How far outputs may be apart: as given, or by the dtype that is computed in, which autocast may tell."""
    if given is not None:
        return given
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else forward.module_dtype
    if dtype == torch.float32 and device.type == "cuda" and _rounds_to_tf32(forward.module):
        return TOLERANCES[torch.float16]
    return TOLERANCES.get(dtype, TOLERANCES[torch.float32])


def _rounds_to_tf32(module: nn.Module) -> bool:
    backends: Any = torch.backends  # of which torch's types lack the newer part
    convolves = any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules())
    used = [backends.fp32_precision, backends.cuda.matmul.fp32_precision]
    return "tf32" in (used + [backends.cudnn.conv.fp32_precision] * convolves)


def few(layout: Layout) -> str:
    """Items for a message."""
    some, more = ", ".join(map(str, layout.items[:FEW])), len(layout) - FEW
    return f"[{some}, ... {more} more]" if more > 0 else f"[{some}]"


def _item_spans(layout: Layout) -> list[Span]:
    """Where the entries of each item are, those that pad it not among them."""
    starts = accumulate(layout.rows, initial=0)
    return [
        Span(start, rows, item, 1, min(layout.length, rows), layout.items, layout.group_of[item], 1)
        for item, (start, rows) in enumerate(zip(starts, layout.rows, strict=False))
    ]


def _errors(came: Sequence[Tensor], expected: Sequence[Tensor], rows_dim: int = 0) -> list[float]:
    """The relative L2 of each pair of tensors; see `Expected.differences`."""
    norms, worst = [], []
    for one, other in zip(came, expected, strict=True):
        a, b = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.double() for x in (one, other))
        if a.shape != b.shape:
            a = torch.full_like(b, torch.inf)
        apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b)
        norms.append(torch.stack([apart.norm(), b.nan_to_num(0.0, 0.0, 0.0).norm()]))
        rows = apart.movedim(rows_dim, 0).flatten(1) if apart.dim() > 1 else apart.reshape(1, -1)
        worst.append(rows.norm(dim=1).max() * max(1, len(rows)) ** 0.5 if rows.numel() else rows.new_zeros(()))
    numbers = [*zip(torch.stack(norms).tolist(), [one.numel() for one in came], strict=True)]
    square = sum(norm**2 for (_, norm), _ in numbers) / max(1, sum(numel for _, numel in numbers))
    scales = [max(norm, (square * numel) ** 0.5, 1e-30) for (_, norm), numel in numbers]
    of_rows = [row / ONE_ROW for row in torch.stack(worst).tolist()]
    errors = [max(apart, row) / scale for ((apart, _), _), row, scale in zip(numbers, of_rows, scales, strict=True)]
    return [error if error == error else torch.inf for error in errors]
