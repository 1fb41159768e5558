"""Check that a module keeps nothing of the rows it runs on: captures run it on rows of their own."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from varlen_graphs.errors import CaptureError, SpecError
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.spec.buffer_spec import BufferSpec
from varlen_graphs.spec.outputs import Parts
from varlen_graphs.watch.kept_state import KeptState
from varlen_graphs.watch.made_up_run import MadeUpRun, OutOfRangeError, run_made_up
from varlen_graphs.watch.thread_modes import run_under

ID_LIMIT = 1024
"""Integer rows are below this, and below the size of every table of the module, which they may index."""

RUNS = 8
"""Number of runs after which a module that changes its state gives the output that it will go on giving."""

ROUNDING = 0.05
"""Relative error between outputs that count as the same."""

Run = Callable[[int], Parts]
"""Runs a module on a few rows, different ones for each integer."""

ON_REAL_ROWS = (
    "run it once on real ones before the first capture (encoder.eager(...) does), or make the encoder with "
    "capture=vg.Capture(lazy=True), whose first call runs eager"
)


def run_first(name: str, named: Sequence[tuple[str, nn.Module]], also: Mapping[str, Any], run: Run) -> Parts:
    """Run a module on rows that no call brought, undo what that changed, and return the output.

    A run may fill caches that follow from sizes. A module that fills parameters or buffers from the rows of its first
    run, or lets them change its later outputs, would be wrong for good.

    Args:
        name: Name of the module.
        named: Its parts and their paths.
        also: Other callables and objects that run with it, by name.
        run: Runs it.

    Raises:
        CaptureError: Something keeps what depends on the rows.
    """
    before = KeptState(named, also)
    undo, kept, settles = True, list[str](), False
    try:
        output = run(1)
        changed = before.differences(KeptState(named, also))
        if undo := bool(changed):
            kept = _kept(name, before, changed, lambda: KeptState(named, also), run)
            settles = not kept and _settles(before, run)
    finally:
        if undo:
            before.restore()
    if kept:
        lost = [path for path in kept if not before.copied(path)]
        raise CaptureError(
            f"{name} keeps what it computes from rows in {', '.join(map(repr, kept))}: captures run it on rows of "
            "their own, which would stay there instead of the first call's"
            + (f"; they were written into {lost}, which is too large to be restored" if lost else "; this was undone")
            + f". If it initialises itself from its first rows, {ON_REAL_ROWS}. If it does so in every call (running "
            "statistics), call module.eval(), or run it without graphs"
        )
    if settles:
        raise CaptureError(
            f"{name} gives another output for the same rows after its first few runs: captures run it too, so graphs "
            "would never give that of the first runs. Let it settle before the first capture (run it a few times, or "
            "set what it counts), or run it without graphs (backend='eager')"
        )
    return output


def _settles(before: KeptState, run: Run) -> bool:
    """Return True if the output for the same rows changes in the first runs only: the proof finds all other changes."""

    def output() -> list[Tensor]:
        return [tensor.clone() for tensor in run(3).tensors]

    before.restore()
    first, *_, last_but_one, last = (output() for _ in range(RUNS))
    return not _close(first, last) and _close(last_but_one, last)


def _close(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Return True if outputs are the same but for rounding, which may differ once a cache is filled."""
    if len(one) != len(other) or any(a.shape != b.shape for a, b in zip(one, other, strict=True)):
        return False
    pairs = [(a.nan_to_num().double(), b.nan_to_num().double()) for a, b in zip(one, other, strict=True)]
    return all(bool((a - b).norm() <= ROUNDING * a.norm()) for a, b in pairs)


def _kept(name: str, before: KeptState, changed: set[str], state: Callable[[], KeptState], run: Run) -> list[str]:
    """Return the paths of what depends on the rows, after a first run on rows 1 that changed something."""

    def after(rows: int) -> tuple[KeptState, list[Tensor]]:
        """Return what a first run on some rows leaves behind, and the output of the next run, on others."""
        before.restore()
        run(rows)
        return state(), [tensor.clone() for tensor in run(3).tensors]

    try:
        (one, output), (other, output_of_other), (again, output_again) = after(1), after(2), after(1)
    except Exception as error:
        raise CaptureError(
            f"{name} changes something in its first run, and fails if that is undone and it runs again on other rows, "
            f"so whether it keeps something of the rows cannot be told: {type(error).__name__}: {error}\n"
            f"Expected a module that can be run again; else {ON_REAL_ROWS}"
        ) from error
    by_chance = {path for path in one.differences(again) if one.copied(path)}  # random numbers, clocks
    differ = one.differences(other) - by_chance
    registered = sorted(path for path in differ if one.registered(path) or other.registered(path))
    matters = _equal(output, output_again) and not _equal(output, output_of_other)
    return registered or (sorted(differ or changed) if matters else [])  # some values cannot be compared


def _equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    same = len(one) == len(other) and all(a.shape == b.shape for a, b in zip(one, other, strict=True))
    return same and all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other, strict=True))


def run_on_sample(
    run: Callable[..., Parts], rows: Tensor, given: dict[str, Tensor], forward: Forward, which: int
) -> Parts:
    """Run a function of rows, and `given` ones beside them, on others of the same form; see `other_values`.

    Indices are checked first on a GPU, because the module may not have all ids that seem valid.

    Raises:
        SpecError: Values of padding, or defaults, that are declared are no indices that the module takes.
    """
    spec = forward.spec
    sample = other_values(
        rows, which, valid_ids(forward, spec.packed.pad, rows.dtype, spec.packed.normalize is not None)
    )
    beside = {}
    for one in spec.inputs:
        if one.name in given:
            tensor = given[one.name]
            if which == 0 and one.default is not None:
                tensor = torch.full_like(tensor, one.default)
            beside[one.name] = other_values(tensor, which, valid_ids(forward, one.pad, tensor.dtype))
    given = given | beside
    ids = bool(spec.layout.columns) or not all(tensor.is_floating_point() for tensor in (sample, *given.values()))
    made_up = partial(run, sample, given=given)
    checked = partial(run_made_up, made_up, sample.device) if ids else made_up
    if which > 1:
        return checked()
    try:
        return checked()
    except CaptureError as error:  # of something that the module raised
        if (found := _out_of_range(error, made_up)) is not None:
            raise SpecError(_wrong_values(type(forward.module).__name__, spec, found)) from error
        raise


def _out_of_range(error: Exception, run: Callable[[], Parts]) -> OutOfRangeError | None:
    """Return the indices out of range behind an error of a run, if it is about some: the CPU does not say which."""
    if isinstance(error.__cause__, IndexError | RuntimeError) and not isinstance(error.__cause__, OutOfRangeError):
        try:
            run_under(run, MadeUpRun())
        except Exception as again:
            error = again
    return error.__cause__ if isinstance(error.__cause__, OutOfRangeError) else None


def _is_integral(dtype: torch.dtype) -> bool:
    """Return True if tensors of a dtype may be indices."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _wrong_values(name: str, spec: BufferSpec, found: OutOfRangeError) -> str:
    """Return what is wrong with declared values that a module does not take as indices."""
    tensors: list[Any] = [spec.packed, *spec.host_buffers, *spec.inputs]
    declared = [one for one in tensors if one.dtype and _is_integral(one.dtype)]
    wrong = [
        f"{type(one).__name__}({one.name!r}, {field}={value})"
        for one in (*declared, *spec.layout.columns)
        for field in ("pad", "default")
        if (value := getattr(one, field, None)) is not None and not found.least <= value <= found.most
    ]
    return (
        f"{name} is captured with padding, and takes indices from {max(0, found.least)} to {found.most}, but got "
        f"{found.low if found.low < found.least else found.high}: "
        + (f"{', '.join(wrong)}; declare a value that it takes" if wrong else "a buffer computes it from padding")
    )


def other_values(tensor: Tensor, which: int, ids: range) -> Tensor:
    """Return another tensor of the same form: any numbers; of integers the same for 0 and 1, else some of `ids`."""
    if tensor.is_floating_point() or tensor.is_complex():
        steps = torch.arange(1, tensor.numel() + 1, device=tensor.device)
        return steps.mul(which).cos().mul(which).view(tensor.shape).to(tensor.dtype)
    if which < 2:
        return tensor.clone()
    steps = torch.arange(tensor.numel(), device=tensor.device).mul(2 * which + 1).add(which)
    return steps.remainder(len(ids)).add(ids.start).view(tensor.shape).to(tensor.dtype)


def valid_ids(forward: Forward, pad: float, dtype: torch.dtype, pixels: bool = False) -> range:
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
