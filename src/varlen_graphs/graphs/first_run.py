"""Check that a module keeps nothing of the rows it runs on: captures run it on rows of their own."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from varlen_graphs.errors import CaptureError
from varlen_graphs.spec.outputs import Parts
from varlen_graphs.watch.kept_state import KeptState

RUNS = 8
"""Number of runs after which a module that changes its state gives the output that it will go on giving."""

ROUNDING = 0.05
"""Relative error between outputs that count as the same."""

Run = Callable[[int], Parts]
"""Runs a module on a few rows, different ones for each integer."""


def run_first(name: str, named: Sequence[tuple[str, nn.Module]], run: Run) -> Parts:
    """Run a module on rows that no call brought, undo what that changed in it, and return the output.

    A run may fill caches that follow from sizes. A module that fills parameters or buffers from the rows of its first
    run, or lets them change its later outputs, would be wrong for good.

    Args:
        name: Name of the module.
        named: Its parts and their paths.
        run: Runs it.

    Raises:
        CaptureError: The module keeps something that depends on the rows.
    """
    before = KeptState(named)
    changed, kept, settles = True, [], False
    try:
        output = run(1)
        if changed := bool(before.differences(KeptState(named))):
            kept = _kept(before, named, run)
            settles = not kept and _settles(before, run)
    finally:
        if changed:
            before.restore()
    if kept:
        lost = [path for path in kept if not before.copied(path)]
        raise CaptureError(
            f"{name} keeps what it computes from rows in {', '.join(map(repr, kept))}: captures run it on rows of "
            "their own, which would stay there instead of the first call's"
            + (f"; they were written into {lost}, which is too large to be restored" if lost else "; this was undone")
            + ". If it initialises itself from its first rows, run it once on real ones before the first capture "
            "(encoder.eager(...) does), or make the encoder with capture=vg.Capture(lazy=True), whose first call runs "
            "eager. If it does so in every call (running statistics), call module.eval(), or run it without graphs"
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


def _kept(before: KeptState, named: Sequence[tuple[str, nn.Module]], run: Run) -> list[str]:
    """Return the paths of what depends on the rows, after a first run on rows 1."""

    def after(rows: int) -> KeptState:
        before.restore()
        run(rows)
        return KeptState(named)

    def output(state: KeptState) -> list[Tensor]:
        state.restore()
        return [tensor.clone() for tensor in run(3).tensors]

    one, other, again = after(1), after(2), after(1)
    by_chance = {path for path in one.differences(again) if one.copied(path)}  # random numbers, clocks
    differ = one.differences(other) - by_chance
    registered = sorted(path for path in differ if one.registered(path) or other.registered(path))
    if registered or not differ:
        return registered
    expected = output(one)
    matters = _equal(expected, output(again)) and not _equal(expected, output(other))
    return sorted(differ) if matters else []


def _equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    same = len(one) == len(other) and all(a.shape == b.shape for a, b in zip(one, other, strict=True))
    return same and all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other, strict=True))


def sample_rows(rows: Tensor, which: int, pixels: bool) -> Tensor:
    """Return other rows of the same form: any numbers, but the same ids, because not every integer may be one."""
    values = torch.arange(1, rows.numel() + 1, device=rows.device).mul(which).cos().mul(which).view(rows.shape)
    if rows.is_floating_point():
        return values.to(rows.dtype)
    return values.mul(40).add(120).to(rows.dtype) if pixels else rows.clone()
