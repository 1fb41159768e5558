"""Check on shadows that what a module keeps between calls changes no output: a graph would not follow it."""

import gc
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from varlen_graphs.checks.error import relative_error
from varlen_graphs.declaration.call import Call
from varlen_graphs.errors import CaptureError, VarlenGraphsError
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.outputs.parts import Parts, flatten
from varlen_graphs.shadows.shadow import Shadow, address_of, held_by, same_bits
from varlen_graphs.shadows.shared_writes import REMEDY, SharedWrites
from varlen_graphs.shadows.snapshot import Changed
from varlen_graphs.torch_dispatch.checked_indices import run_checked
from varlen_graphs.torch_dispatch.leaves import leaves_of, tensors_in
from varlen_graphs.torch_dispatch.sharded import local_tensor
from varlen_graphs.torch_dispatch.thread_modes import run_under

ROUNDING = 8
"""Ratio to the precision of a dtype of what outputs may differ by where a cache is filled."""

OUT_OF_REACH = (
    "{} gives another output for the same rows after other calls, whatever it holds itself: it keeps something where "
    "no copy of it reaches, such as a global, an attribute of a class, or a generator, and runs for the capture have "
    "changed that. Keep it in the module, compute in each call what depends on the call, or run the module without "
    "graphs (backend='eager')"
)

FEW = 4
"""Number of further runs that are made if the module keeps something."""

MANY = 1000
"""Number of further calls whose effect on numbers is tried."""

ODD = 4
"""The run of a sample that has an odd number of rows, if there may be one."""

LARGE = 64
"""The run of larger numbers than others, which moves a maximum that these leave."""

FIRST = 1, False
"""Key of the output of the first rows."""

Run = Callable[[int], Parts]
"""Runs a forward on a few rows, different ones for each integer; see `ODD` and `LARGE`."""


NOT_COMPUTED = (
    "{} keeps a tensor where no copy of it reaches, such as a cache of a function, and the capture that made it "
    "failed, so nothing has computed it: clear that cache, and keep such tensors in the module, or run the module "
    "without graphs (backend='eager')"
)


def raise_changed_outside(forward: Forward, why: str = OUT_OF_REACH) -> NoReturn:
    """Raise that runs for captures have changed what a module keeps outside of itself, here and in later calls."""
    forward.verdict.changed_outside = why.format(type(forward.module).__name__)
    raise CaptureError(forward.verdict.changed_outside)


class StateCheck:
    """Runs a forward on shadows of its module, which tell what it keeps, and whether its output depends on that.

    Args:
        forward: The forward.
        runs: Returns the function that runs a forward.
        of_an_item: The same for an item that is as short as can be; `None` does not try that.

    Attributes:
        shadow: The shadow on which all runs beside captures are made.
        forward: The forward over it.
        writes: Watches the runs that begin the check.
        kept: Paths of what every run changes, and that changes no output; known in the end.
    """

    def __init__(
        self, forward: Forward, runs: Callable[[Forward], Run], of_an_item: Callable[[Forward], Run] | None = None
    ) -> None:
        self._original = forward
        self._of_an_item = of_an_item
        self._name = type(forward.module).__name__
        self._runs = runs
        self.shadow = Shadow(forward.module)
        self.forward = forward.on(self.shadow)
        self._run = runs(self.forward)
        self.writes = _Writes(self.shadow)
        self.kept: list[str] = []
        self._outputs: dict[tuple[int, bool], list[Tensor]] = {}  # the first one of each rows
        self._others: list[tuple[list[Tensor], list[Tensor]]] = []  # with another output of the same rows
        self._versions = _versions(self.shadow.shared)

    def begin(self, at_capacity: Callable[[], object] | None = None, is_first: bool = False) -> None:
        """Run the forward once, and on other shadows if that changed something; then at the capacity of a budget.

        Args:
            at_capacity: Runs the forward so; the capture tells what is wrong then.
            is_first: True if the module itself has not run before.

        Raises:
            CaptureError: The module writes to its parameters, registers what depends on its rows, or lets the rows of
                one run change the output of the next.
        """
        self._noted(1, self._run, self.shadow, self.writes)
        if self.writes.keeps_outside(self.forward, self.shadow):
            again = self._again(self._run, self.shadow)[1]  # a thread that compiled a kernel has ended by then
            if any(one.keeps_outside(self.forward, self.shadow) for one in (self.writes, again)):
                if is_first:
                    raise_changed_outside(self._original)
                if (why := self.find_mismatch()) is not None:  # now: replays over NaN write to what it keeps there
                    raise CaptureError(why)
        if changed := self.shadow.changes():
            self._compare(changed)
            for which in (2, 3) * (FEW // 2):  # as often as captures do, which share what was not written
                with suppress(Exception):
                    self._noted(which, self._run, self.shadow, self.writes)
            self._outputs = {FIRST: self._outputs[FIRST]}  # others may be large
            self._again(self._run, self.shadow)
        if at_capacity is not None:
            with suppress(Exception):
                run_under(at_capacity, self.writes)
            if self.shadow.changed():
                self._again(self._run, self.shadow)

    def mutated_state(self) -> set[int]:
        """Return the addresses of the storages that the module has written to so far. Syncs."""
        return {
            address_of(original)
            for _, original, clone in self.shadow.cloned
            if address_of(clone) in self.writes.written or not same_bits(original, clone)
        }

    def find_mismatch(self) -> str | None:
        """Run the first rows again, after all other runs, and as if there had been many more.

        Return why graphs would be wrong: the output is another one.

        Raises:
            CaptureError: It is so on a new shadow, too.
        """
        for which in (2, 3, LARGE):  # of either sign
            self._short(self.forward, self.shadow, which)
            _, writes = self._again(self._run, self.shadow)
        with suppress(Exception):  # it may take no such numbers
            self._noted(LARGE, self._run, self.shadow, writes)
            _, writes = self._again(self._run, self.shadow)
        if self.shadow.changed():  # which may hide what the runs have changed outside
            self._fresh(1)
        if self._others:
            (*_, one), (*_, other) = self._fresh(1), self._fresh(1)
            if _versions(self.shadow.shared) != self._versions:
                return None  # somebody updates the weights meanwhile, which graphs follow
            noise, precision = _apart(one, other), _precision(one)
            if self.shadow.random.missed:
                return None  # it draws random numbers, which no two runs agree in
            if noise > precision**0.5:  # both have drawn the same random numbers
                raise_changed_outside(self._original)
            allowed = ROUNDING * max(noise, precision)  # it may round in another way once a cache is filled
            if any(_apart(*outputs) > allowed for outputs in self._others):
                if _apart(self._outputs[FIRST], one) > allowed:
                    raise_changed_outside(self._original)
                return self.mismatch("after other calls", self.shadow.changes())
        return self._mismatch_of_more_runs() if writes.written or self.shadow.changed() else None

    def _mismatch_of_more_runs(self) -> str | None:
        """Return why the output changes with more runs, if it does: of a new shadow, because others have run on NaN."""
        fresh, known = Shadow(self._original.module), len(self._others)
        own = self._original.on(fresh)
        for which in (2, 3, LARGE, 2):
            self._short(own, fresh, which)
        if any(_apart(*outputs) > ROUNDING * _precision(outputs[0]) for outputs in self._others[known:]):
            return self.mismatch("after a first call of few rows", self.shadow.changes())
        shadow = Shadow(self._original.module)
        run = self._runs(self._original.on(shadow))
        again = partial(self._again, run, shadow)
        first, _ = again()
        for which in (2, ODD, 3, ODD):
            with suppress(CaptureError):  # it takes no other rows
                run_under(partial(run, which), _Writes(shadow))
        later, writes = again()
        changed = shadow.changed()
        if not (changed or writes.written or fresh.changed()):
            return None if _close(first, later) else self.mismatch("after a few more calls", self.shadow.changes())
        paths, before = [one.path for one in changed], [_copy(one.now) for one in changed]
        lists = [(one, len(one.own)) for one in changed if isinstance(one.own, list | deque)]
        if not _close(first, later) or not all(_close(again()[0], later) for _ in range(FEW)):
            return self.mismatch("after a few more calls", paths)
        moved = [one.path for one, value in zip(changed, before, strict=True) if _extrapolate(one, value)]
        for entry, length in lists:
            if length < len(entry.own) < length + MANY:  # of each list once
                entry.own.extend([entry.own[-1]] * MANY)
                moved.append(entry.path)
        for path, _, clone in shadow.cloned:
            if address_of(clone) in writes.written and path not in moved:
                times = MANY if clone.is_floating_point() else 2  # a maximum may grow by much
                clone.copy_(~clone if clone.dtype == torch.bool else times * clone + 1)
                moved.append(path)
        far: list[Tensor] | None = None
        with suppress(Exception):  # of numbers that do not belong together any more
            far = again()[0] if moved else None
        if far is not None and not _close(far, later):
            return self.mismatch("after many more calls", moved)
        self.kept = sorted(moved)
        return None

    def mismatch(self, when: str, changed: Sequence[str]) -> str:
        """Describe that the output is another one after some calls, which have changed what lies at these paths."""
        where = f", and keeps something in {', '.join(map(repr, sorted({*changed})))}" if changed else ""
        return (
            f"{self._name} gives another output for the same rows {when}{where}: a graph would give the output of its "
            "capture. Compute in each call what depends on the call."
        )

    def _noted(self, which: int, run: Run, shadow: Shadow, writes: "_Writes", is_short: bool = False) -> list[Tensor]:
        """Run some rows, always with the same random numbers; note an output that is not the first of these rows."""
        shadow.random.restart()
        output = _tensors(run_under(partial(run, which), writes))
        first = self._outputs.setdefault((which, is_short), output)
        if not _equal(first, output):
            self._others.append((first, output))
        return output

    def _short(self, forward: Forward, shadow: Shadow, which: int) -> None:
        """Run a short item, if the forward takes it."""
        if self._of_an_item is not None:
            with suppress(Exception):  # it may need more rows
                self._noted(which, self._of_an_item(forward), shadow, _Writes(shadow), is_short=True)

    def _again(self, run: Run, shadow: Shadow) -> tuple[list[Tensor], "_Writes"]:
        """Run the first rows again, with the same random numbers."""
        writes = _Writes(shadow)
        return self._noted(1, run, shadow, writes), writes

    def _compare(self, changed: Sequence[str]) -> None:
        """Compare what runs of other rows leave behind, and the outputs after them."""
        try:
            fresh = [self._fresh(which) for which in (1, 2, 1)]
            one, other, again = (Shadow(shadow.module, (), compares=False) for shadow, _, _ in fresh)
            differ = _differences(one, other) - _differences(one, again)  # but random numbers and clocks
            registered = sorted(path for path in differ if one.registered(path) or other.registered(path))
            outputs = [self._noted(3, run, shadow, _Writes(shadow)) for shadow, run, _ in fresh]
        except VarlenGraphsError:
            raise
        except Exception as error:
            raise CaptureError(
                f"{self._name} changes something in a run, and fails if it runs again on other rows, so whether it "
                f"keeps something of the rows cannot be told: {type(error).__name__}: {error}\n"
                f"Expected a module that can be run again. {REMEDY}"
            ) from error
        matters = _equal(outputs[0], outputs[2]) and not _equal(outputs[0], outputs[1])
        if kept := registered or (sorted(differ or changed) if matters else []):
            raise CaptureError(
                f"{self._name} keeps what it computes from rows in {', '.join(map(repr, kept))}: a graph would not "
                f"follow it. {REMEDY}"
            )

    def _fresh(self, which: int) -> tuple[Shadow, Run, list[Tensor]]:
        """Run the forward on a new shadow; return that, the function that runs it, and the output."""
        shadow = Shadow(self._original.module)
        run = self._runs(self._original.on(shadow))
        return shadow, run, self._noted(which, run, shadow, _Writes(shadow))


class _Writes(SharedWrites):
    """Follows what a run makes, too, and counts no writes to that."""

    def __init__(self, shadow: Shadow) -> None:
        super().__init__(shadow)
        self._new: set[int] = set()
        self._made: dict[int, tuple[weakref.ref[torch.UntypedStorage], bool]] = {}  # by address, whether of sizes alone

    def run_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and return its result."""
        result = super().run_operator(func, args, kwargs)
        made_of_numbers = func is torch.ops.aten.lift_fresh.default  # the last step of `torch.tensor`
        inputs = set() if made_of_numbers else {*map(address_of, tensors_in(args, kwargs))}
        of_sizes = all(map(self._is_of_sizes, inputs))
        for made in leaves_of(result):
            if isinstance(made, Tensor) and (address := address_of(made)):
                is_new = address not in inputs  # no view, nor what was written in place
                if is_new:
                    self._new.add(address)
                if is_new or address in self._made:
                    self._made[address] = weakref.ref(local_tensor(made).untyped_storage()), of_sizes
        return result

    def note_write(self, address: int) -> None:
        """Note that memory of before the run is written."""
        if address not in self._new:
            super().note_write(address)

    def _is_of_sizes(self, address: int) -> bool:
        """Return True if a run has made a tensor of no rows there; others may lie where one of these was."""
        own, of_sizes = self._made.get(address, (None, False))
        return own is not None and own() is not None and of_sizes

    def keeps_outside(self, forward: Forward, shadow: Shadow) -> bool:
        """Return True if something that runs computed of rows lives on, and neither shadow nor forward holds it."""

        def alive() -> set[int]:
            return {address for address, (own, of_sizes) in self._made.items() if own() is not None and not of_sizes}

        if not alive():
            return False
        held = held_by(shadow.module, forward.beside)
        addresses = {address_of(one.value) for one in held if isinstance(one.value, Tensor)}
        if alive() - addresses:
            gc.collect()  # nobody keeps what only a cycle refers to
        return bool(alive() - addresses)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often tensors were written, where torch counts that."""
    return [one._version for one in tensors if not one.is_inference()]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _extrapolate(change: Changed, before: Any) -> bool:
    """Change a number, or numbers, as many more calls would; return False where nothing goes on.

    By what the last run changed, or else by what all runs did: a maximum changes in some runs only.
    """
    now = change.now
    if isinstance(now, Tensor):
        if now.numel() == 1 and isinstance(before, Tensor) and same_bits(now, before):  # larger ones may be tables
            before = change.before
        alike = isinstance(before, Tensor) and (now.shape, now.dtype) == (before.shape, before.dtype)
        if not alike or now.dtype == torch.bool or same_bits(now, before):
            return False
        change.set(now + MANY * (now - before))
        return True
    numbers = type(now) in (int, float) and type(now) is type(before) is type(change.before)
    step = (now - before or now - change.before) if numbers else 0
    if step:
        change.set(now + MANY * step)
    return bool(step)


def runs_of(call: Call) -> Callable[[Forward], Run]:
    """Return the runs of a call, and of its items with other rows."""

    def runs(forward: Forward) -> Run:
        def run(which: int) -> Parts:
            rows = call.rows if which == 1 else _other(call.rows, which)
            run_exact = partial(forward.exact, replace(call, rows=rows))
            return flatten(run_checked(run_exact, rows.device), forward.spec.declared)  # defaults are no caller's

        return run

    return runs


def _other(rows: Tensor, which: int) -> Tensor:
    """Return other rows, in the range of the given ones: reflected in it, or turned and, if numbers, smaller. Syncs.

    `LARGE` ones are twice as large, if numbers.
    """
    is_integral = not (rows.is_floating_point() or rows.is_complex())
    if which == 2 and rows.numel() and not rows.is_complex():
        values = rows.long() if is_integral else rows.double()
        low, high = values.aminmax()
        if is_integral or (high - low).isfinite():
            return (low + high - values).to(rows.dtype)
    factor = 2 if which == LARGE else 1 / which
    return rows.flip(-1) if is_integral else (rows.flip(-1) * factor).to(rows.dtype)


def _tensors(parts: Parts) -> list[Tensor]:
    return [tensor.clone() for tensor in parts.tensors]


def _differences(one: Shadow, other: Shadow) -> set[str]:
    """Return the paths where what two shadows hold differs."""
    paths = one.values.keys() | other.values.keys()
    return {path for path in paths if not _alike(one.values.get(path), other.values.get(path))}


def _alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one is other or same_bits(local_tensor(one), local_tensor(other))
    return bool(one == other or one != one)


def _equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(same_bits, one, other))


def _close(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and (_equal(one, other) or _apart(one, other) <= ROUNDING * _precision(one))


def _apart(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the largest relative error of two outputs. Syncs."""
    return max((relative_error(one, other) for one, other in zip(others, some, strict=True)), default=0.0)


def _precision(tensors: Sequence[Tensor]) -> float:
    """Return the precision of the least precise tensor."""
    return max((torch.finfo(one.dtype).eps for one in tensors if one.is_floating_point()), default=0.0)
