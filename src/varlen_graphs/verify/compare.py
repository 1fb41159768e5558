"""Compare the outputs of a run with the expected outputs of a call, item by item."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from varlen_graphs.declaration.call import Call
from varlen_graphs.declaration.static_args import alike
from varlen_graphs.graphs.forward import MODULE, Forward
from varlen_graphs.layouts.item_slice import ItemSlice
from varlen_graphs.layouts.items import Layout
from varlen_graphs.layouts.packed_batch import item_sizes, pack_rows
from varlen_graphs.outputs.entries import Extent
from varlen_graphs.outputs.parts import CONSTANTS, Parts, Path, at, name_of

TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Allowed relative error by dtype of the computation. TF32 rounds as float16 does, quantised weights as bfloat16."""

ONE_ROW = 8
"""Ratio of the error of one row to that of its whole item that rounding alone can cause."""

MOST_NAN = 3 / 4
"""Share of NaN in an expected output above which it shows too little: NaN counts as equal to any other."""

NOISE = 8
"""Ratio of an accepted error to the change of the output when rows change by a rounding error."""

MOST_NOISE = 0.25
"""Largest error that is accepted for this reason."""

ENTRIES = 1 << 22
"""Number of entries above which pairs of tensors are compared apart, in float64 and a few copies."""

FEW = 8
"""Number of items of a call that a message lists."""


class Difference(NamedTuple):
    """Largest difference between two outputs of a call."""

    error: float  # relative L2, as `Example.differences` defines it
    item: int
    where: str  # tensor and item, for messages


@dataclass(frozen=True, eq=False)
class Example:
    """A call, and what it should give.

    Attributes:
        call: The call, whose items were read.
        expected: The output of the module itself, or of the declared forward.
        against: Which of the two, in words.
        any_integers: If True, integers and flags may have another such dtype: a mask that a module hands on has that
            of the call's own.
    """

    call: Call
    expected: Any
    against: str = MODULE
    any_integers: bool = False

    @property
    def layout(self) -> Layout:
        """The items of the call."""
        assert self.call.layout is not None  # noqa: S101 - they were read
        return self.call.layout

    def differences(self, actual: Parts, run: Call | None = None, items: Sequence[int] = ()) -> list[Difference]:
        """Return the difference of each item of a run, in the worst tensor: of this call by default.

        Of another one, `items` are the indices that its items have in this call.
        """
        return self.compare(actual, run, items)()

    def compare(
        self, actual: Parts, run: Call | None = None, items: Sequence[int] = ()
    ) -> Callable[[], list[Difference]]:
        """Queue the comparison of a run; return a function that waits for it and returns the `differences`."""
        # An error is relative to the item's own output, or to an average item of its size if that is larger: outputs
        # near zero hold nothing but rounding. One wrong row hardly changes the error of an item of many rows, so an
        # eighth of the error of the worst row counts as well, relative to an average row. Non-finite values that agree
        # count as equal; other ones, and other shapes, are an infinite error.
        run, items = run or self.call, items or range(len(self.layout))
        compared = [(self._name(path, actual), copied(errors)) for path, errors in self._errors(actual, run, items)]

        def differences() -> list[Difference]:
            found, layout = [Difference(0.0, item, "output") for item in items], self.layout
            for name, errors in compared:
                wheres = [f"{name} of item {item}, {layout.told(item)}," for item in items]
                found = [max(pair) for pair in zip(found, map(Difference, errors(), items, wheres), strict=True)]
            return found

        return differences

    def furthest(self, actual: Parts, run: Call | None = None, items: Sequence[int] = ()) -> Difference:
        """Return the largest of the `differences`."""
        return max(self.differences(actual, run, items))

    def differs_from(self, other: Any, form: Parts) -> float:
        """Return the error of another output of the same call, in the tensors of a replay."""
        tensors = [at(other, path) for path in form.paths]
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            return 0.0  # the comparison with the replay reports it
        return self.furthest(replace(form, tensors=tensors)).error

    def allowed(self, found: Difference, limit: float, forward: Forward, form: Parts) -> float:
        """Return the largest error that is allowed: more than `limit` if changes by a rounding error cause one found.

        They do in modules that round activations, such as quantised ones. Syncs.
        """
        rows = self.call.rows
        if found.error <= limit or not rows.is_floating_point():
            return limit
        noise = torch.randn(rows.shape, generator=torch.Generator(rows.device).manual_seed(1), device=rows.device)
        nudged = (rows * (1 + 2 * torch.finfo(rows.dtype).eps * noise)).to(rows.dtype)
        one, again, other = (forward.exact(replace(self.call, rows=some)) for some in (rows, rows, nudged))
        first = Example(self.call, one)
        if first.differs_from(again, form) > limit:
            return limit  # random numbers are no rounding
        return max(limit, min(MOST_NOISE, NOISE * first.differs_from(other, form)))

    def nan_items(self, actual: Parts) -> set[int]:
        """Return the items with NaN where another output of the call, of all its items, has numbers. Syncs."""
        found, slices = set[int](), item_slices(self.layout)
        for tensor, extent, path in zip(actual.tensors, actual.extents, actual.paths, strict=True):
            expected = at(self.expected, path)
            if isinstance(expected, Tensor) and expected.is_floating_point():
                own, other = (_packed(one, extent, self.call) for one in (expected, tensor))
                for item, item_slice in enumerate(slices):
                    a, b = extent.part(own, item_slice), extent.part(other, item_slice)
                    if a.shape == b.shape and bool((a.isnan() & ~b.isnan()).any()):
                        found.add(item)
        return found

    def _name(self, path: Path, actual: Parts) -> str:
        """Return the name of a tensor or value for messages, with its dtype, or the value, if another is expected."""
        expected, tensors = at(self.expected, path), dict(zip(actual.paths, actual.tensors, strict=True))
        if path in actual.values:
            instead = "tensors" if _holds_tensors(expected) else repr(expected)
            return f"{name_of(path)} ({actual.values[path]!r} instead of {instead})"
        if path not in tensors or not isinstance(expected, Tensor) or tensors[path].dtype == expected.dtype:
            return name_of(path)
        return f"{name_of(path)} ({tensors[path].dtype} instead of {expected.dtype})"

    def _errors(self, actual: Parts, run: Call, items: Sequence[int]) -> Iterator[tuple[Path, Tensor]]:
        """Yield the errors of all items in each tensor, and in Python values that differ, float64 `[items]`."""
        assert run.layout is not None  # noqa: S101 - its items were read
        own_slices, slices = item_slices(self.layout), item_slices(run.layout)
        paths = {*actual.paths}
        missing = [at(self.expected, path) is None for path in actual.paths]
        for tensor, extent, path in zip(actual.tensors, actual.extents, actual.paths, strict=True):
            expected, wrong = at(self.expected, path), tensor.new_full((len(items),), torch.inf, dtype=torch.float64)
            if isinstance(expected, Tensor):
                sizes = extent.size(ItemSlice.of(self.layout))
                other_form = not self.call.padded and expected.shape[extent.rows_dim :][: len(sizes)] != sizes
                if other_form or not self._may_be(tensor.dtype, expected.dtype):
                    yield path, wrong
                    continue
                expected, tensor = _packed(expected, extent, self.call), _packed(tensor, extent, run)
                expected_parts = [extent.part(expected, own_slices[item]) for item in items]
                yield (
                    path,
                    _errors(
                        [extent.part(tensor, item_slice) for item_slice in slices], expected_parts, extent.rows_dim
                    ),
                )
            elif expected is not None or all(missing):  # a field that the module leaves empty may hold something
                yield path, wrong
            if self._goes_on_after(path) and _next(path) not in paths:
                yield path, wrong
        for path, value in actual.values.items():
            expected = at(self.expected, path)
            left_out = value is None and _holds_tensors(expected)
            if left_out or (isinstance(expected, CONSTANTS) and not (expected is None or alike(value, expected))):
                yield path, torch.full((len(items),), torch.inf, dtype=torch.float64, device="cpu")

    def _may_be(self, dtype: torch.dtype, expected: torch.dtype) -> bool:
        """Return True if a tensor may have this dtype."""
        floating = any(one.is_floating_point or one.is_complex for one in (dtype, expected))
        return dtype == expected or (self.any_integers and not floating)

    def _goes_on_after(self, path: Path) -> bool:
        """Return True if a tensor follows in the same tuple of a field of the expected output."""
        return len(path) > 1 and isinstance(path[-1], int) and isinstance(at(self.expected, _next(path)), Tensor)


def _holds_tensors(part: Any) -> bool:
    """Return True for a tensor, and for a tuple, list or mapping that holds some."""
    parts = part.values() if isinstance(part, Mapping) else part if isinstance(part, tuple | list) else ()
    return isinstance(part, Tensor) or any(map(_holds_tensors, parts))


def _packed(tensor: Tensor, extent: Extent, call: Call) -> Tensor:
    """Return the real entries of a tensor that a call returns as a batch, packed; any other tensor as it is."""
    layout, padded = call.layout, call.padded
    if layout is None or not padded:
        return tensor
    sizes = extent.padded([*item_sizes(layout, len(padded)), tuple(padded)])
    if sizes is None or tensor.shape[:2] != (len(layout), prod(sizes[-1])):  # other numbers are an error of its items
        return tensor
    return pack_rows(tensor.unflatten(1, sizes[-1]), sizes[:-1])


def _next(path: Path) -> Path:
    """Return the path of the next entry of a tuple."""
    *parents, index = path
    return (*parents, index + 1)  # type: ignore[operator]  # of a tuple


def copied(tensor: Tensor) -> Callable[[], Any]:
    """Queue the copy of a tensor to the host; return a function that waits for it alone, and returns it as a list."""
    if not tensor.is_cuda:
        return tensor.tolist
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def listed() -> Any:
        done.synchronize()
        return host.tolist()

    return listed


def equal(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have the same values, NaN included. Syncs with the device."""
    return bool(all_equal([one], [other]))


def all_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return True, as bool `[]`, if tensors have the same values, NaN included. No sync."""
    flags = []
    for one, other in zip(some, others, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return torch.zeros((), dtype=torch.bool, device=one.device)
        same = one == other
        if one.is_floating_point() or one.is_complex():
            same |= one.isnan() & other.isnan()
        flags.append(same.all())
    return torch.stack(flags).all()


def close(one: Tensor, other: Tensor, limit: float) -> bool:
    """Return True if tensors are within a relative L2, or are not floating. Syncs with the device."""
    return not one.is_floating_point() or float(_errors([one], [other])) <= limit


def limit_of(given: float | None, forward: Forward, device: torch.device) -> float:
    """Return the given tolerance, or that of the dtype of the computation, which autocast may choose."""
    if given is not None:
        return given
    if any(map(_is_quantised, forward.module.parameters())):
        return TOLERANCES[torch.bfloat16]
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else forward.module_dtype
    if dtype == torch.float32 and device.type == "cuda" and _rounds_to_tf32(forward.module):
        return TOLERANCES[torch.float16]
    return TOLERANCES.get(dtype, TOLERANCES[torch.float32])


def _is_quantised(weight: Tensor) -> bool:
    """Return True for a matrix of numbers of one byte; flags are none."""
    return weight.dtype.itemsize == 1 and weight.dtype is not torch.bool and weight.dim() > 1


def _rounds_to_tf32(module: nn.Module) -> bool:
    backends: Any = torch.backends  # torch's type stubs lack fp32_precision
    convolves = any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules())
    used = [backends.fp32_precision, backends.cuda.matmul.fp32_precision]
    return "tf32" in (used + [backends.cudnn.conv.fp32_precision] * convolves)


def nan_shares(tensors: Sequence[Tensor]) -> tuple[float, float]:
    """Return the largest and the smallest share of NaN in a tensor. Syncs with the device."""
    floating = [t for t in tensors if t.numel() and (t.is_floating_point() or t.is_complex())]
    shares = [t.isnan().double().mean() for t in map(_comparable, floating)]
    listed = torch.stack(shares).tolist() if shares else [0.0]
    return max(listed), min(listed)


def _comparable(tensor: Tensor) -> Tensor:
    """Return real float64 entries, because torch lacks kernels for some dtypes."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).double()
    return tensor.double()


def few(layout: Layout) -> str:
    """Format the items of a layout for a message."""
    some, more = ", ".join(map(layout.told, range(len(layout))[:FEW])), len(layout) - FEW
    return f"[{some}, ... {more} more]" if more > 0 else f"[{some}]"


def item_slices(layout: Layout) -> list[ItemSlice]:
    """Return the slice of each item, without the rows that pad it."""
    starts = accumulate(layout.rows, initial=0)
    return [
        ItemSlice(start, rows, item, 1, min(layout.length, rows), layout.items, layout.group_of[item], 1)
        for item, (start, rows) in enumerate(zip(starts, layout.rows, strict=False))
    ]


def _errors(actual: Sequence[Tensor], expected: Sequence[Tensor], rows_dim: int = 0) -> Tensor:
    """Return the error of each pair of tensors, float64 `[pairs]`, as `Example.differences` defines it. No sync.

    Pairs whose rows have one shape are compared together: a call may hold many items, and each launch costs the host.
    """
    norms = []
    for pairs, comparable in _chunks(actual, expected, rows_dim):
        ones, others = ([tensors[pair] for pair in pairs] for tensors in (actual, expected))
        if comparable:
            norms.append(_norms(ones, others, rows_dim))
        else:  # nothing to compare, or something else
            error = 0.0 if ones[0].shape == others[0].shape and not ones[0].numel() else torch.inf
            norms.append(torch.zeros(4, 1, dtype=torch.float64, device=ones[0].device))
            norms[-1][0] = error
    whole, own, worst, size = torch.cat(norms, 1)
    average = size * own.norm() / size.norm().clamp(min=1)
    scale = torch.maximum(own, average).clamp(min=1e-30)
    return (torch.maximum(whole, worst / ONE_ROW) / scale).nan_to_num(torch.inf, torch.inf)


def _chunks(actual: Sequence[Tensor], expected: Sequence[Tensor], rows_dim: int) -> Iterator[tuple[list[int], bool]]:
    """Yield successive pairs whose rows have one shape, with up to `ENTRIES` entries, or one pair that has more.

    Pairs that cannot be compared come one by one, with False.
    """
    part, form, entries = list[int](), torch.Size(), 0
    for pair, (one, other) in enumerate(zip(actual, expected, strict=True)):
        comparable = one.shape == other.shape and one.is_complex() == other.is_complex() and one.numel() > 0
        row = one.shape[:rows_dim] + one.shape[rows_dim + 1 :]
        if part and (not comparable or row != form or entries + one.numel() > ENTRIES):
            yield part, True
            part, entries = [], 0
        if comparable:
            part, form, entries = [*part, pair], row, entries + one.numel()
        else:
            yield [pair], False
    if part:
        yield part, True


def _norms(actual: Sequence[Tensor], expected: Sequence[Tensor], rows_dim: int) -> Tensor:
    """Return four numbers for each pair, whose rows have one shape, float64 `[4, pairs]`. No sync.

    The norms of the difference, of the second tensor, and of the worst row of the difference, times the root of the
    number of rows; and the root of the number of entries. A tensor of one dimension has no rows.
    """
    one, other = (_by_row(tensors, rows_dim) for tensors in (actual, expected))
    a, b = ((torch.view_as_real(x.resolve_conj()).flatten(1) if x.is_complex() else x).double() for x in (one, other))
    if not (other.is_floating_point() or other.is_complex()):  # the share that is not equal
        a, b = 1.0 + (one != other).double(), torch.ones_like(b)
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b).norm(dim=1).square()
    own = b.nan_to_num(0.0, 0.0, 0.0).norm(dim=1).square()
    has_rows = actual[0].dim() > 1
    rows = torch.tensor([tensor.shape[rows_dim] if has_rows else tensor.numel() for tensor in actual], device="cpu")
    if own.is_cuda:
        rows = rows.pin_memory().to(own.device, non_blocking=True)
    reductions = ((apart, "sum"), (own, "sum"), (apart, "max"))
    whole, norm, worst = (torch.segment_reduce(of, how, lengths=rows, unsafe=True) for of, how in reductions)
    return torch.stack([whole, norm, worst * rows * has_rows, rows.double() * b.shape[1]]).sqrt()


def _by_row(tensors: Sequence[Tensor], rows_dim: int) -> Tensor:
    """Return the rows of all tensors, `[rows, entries]`; of tensors of one dimension each entry."""
    if tensors[0].dim() > 1:
        return torch.cat([*tensors], rows_dim).movedim(rows_dim, 0).flatten(1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])[:, None]
