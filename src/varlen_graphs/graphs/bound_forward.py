"""The forward with the static arguments of one set of graphs, as it is captured."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.capture.memory import is_out_of_memory
from varlen_graphs.capture.mode import Mode
from varlen_graphs.capture.torch_modes import active_mode
from varlen_graphs.errors import CaptureError, VarlenGraphsError
from varlen_graphs.graphs.arena import Arena
from varlen_graphs.graphs.first_run import run_on_sample
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.graphs.output_form import check_constants, check_entries, entries
from varlen_graphs.graphs.shared_arguments import check_shared
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.outputs.parts import Parts, SizeError, check_extents, clear_gaps, flatten
from varlen_graphs.shadows.shadow import address_of, held_by
from varlen_graphs.shadows.shared_writes import SharedWrites
from varlen_graphs.torch_dispatch.lines import raising_line
from varlen_graphs.torch_dispatch.rules_mode import CaptureRulesMode
from varlen_graphs.torch_dispatch.thread_modes import Result, run_under


class BoundForward:
    """The forward with static arguments, over the arena, in the mode of construction.

    Args:
        forward: The forward.
        static_args: Its static arguments.
        mode: The mode that graphs hold for.
        writes: Watches runs without the compiler's code, which must not write to what a shadow shares.
    """

    def __init__(
        self,
        forward: Forward,
        static_args: dict[str, Any],
        mode: Mode,
        writes: SharedWrites | None = None,
    ) -> None:
        self._forward = forward
        self._static_args = static_args
        self._mode = mode
        self._writes = writes

    @property
    def is_compiled(self) -> bool:
        """True if graphs hold the output of torch's compiler."""
        return self._forward.compiled is not None

    @property
    def meets_compiler(self) -> bool:
        """True if graphs hold code of torch's compiler, or runs may have met some."""
        return self._writes is None or self.is_compiled or self._writes.met_compiled

    def held(self) -> set[int]:
        """Return the addresses of the tensors that the module, and functions beside it, hold now."""
        held = held_by(self._forward.module, self._forward.beside)
        return {address_of(one.value) for one in held if isinstance(one.value, Tensor)}

    @property
    def compile_seconds(self) -> float | None:
        """Time that torch's compiler took; `None` if there is none, or it has not run."""
        compiled = self._forward.compiled
        return None if compiled is None else compiled.seconds

    def __call__(self, rows: Tensor, table: ItemTable, given: dict[str, Tensor], compiled: bool = True) -> Parts:
        """Run rows, items, host buffers and inputs, and take the output apart, checked.

        Runs the compiler's code, if there is one, unless `compiled=False`.
        """
        device = rows.device.type
        # The forward may cache casts under an autocast of its own, for as long as one around the call lasts: a graph
        # would read what was cast before it, and others what was cast in its memory.
        torch.clear_autocast_cache()
        try:
            with self._mode.autocast(device), self._named(rows, table):
                arguments = self._forward.arguments(rows, table, given, self._static_args)
                run = partial(self._forward.run, arguments, table.budget if compiled and device == "cuda" else None)
                output = run() if compiled or self._writes is None else run_under(run, self._writes)
        except CaptureError as error:
            if error.__cause__ is not None and (refusal := self._why_refused(rows, table, given)) is not None:
                raise refusal from error.__cause__
            raise
        finally:
            torch.clear_autocast_cache()
        parts = self._forward.take_apart(output, self._static_args, table.budget)
        clear_gaps(parts, table)
        return parts

    def warm_up(self, rows: Tensor, table: ItemTable, given: dict[str, Tensor]) -> None:
        """Run once without the compiler's code; and with it, if there is some."""
        self(rows, table, given, compiled=False)
        if self.meets_compiler:
            self(rows, table, given)

    def guarded(self, run: Callable[[], Result]) -> Result:
        """Call a function that runs this under another mode, without writes to what a shadow shares."""
        return run() if self._writes is None else run_under(run, self._writes)

    def _why_refused(self, rows: Tensor, table: ItemTable, given: dict[str, Tensor]) -> CaptureError | None:
        """Return the rule of captures that the module broke in a run that failed, if that is why; else `None`."""
        if active_mode() is not None:  # of who watches already
            return None
        with suppress(Exception), self._mode.autocast(rows.device.type):
            arguments = self._forward.arguments(rows, table, given, self._static_args)
            try:
                rules = CaptureRulesMode(rows.device, "the module")
                rules.watch(partial(self._forward.run, arguments))
            except CaptureError as refusal:
                return refusal
        return None

    def probe(self, arena: Arena) -> Sequence[Any]:
        """Return the Python values of an output without padding; the same runs check the entries of its tensors.

        Rows and items come in two proportions: a wrong declaration fits one of them at most.

        Raises:
            SpecError: The output is not as declared, or the module writes to memory that two arguments share.
        """
        try:
            probes = [self.run_probe(one) for one in arena.probes()]  # `map` would take the module's StopIteration
            first = probes[0]
            for parts in probes:
                check_entries(entries(parts), entries(first))
                check_constants(parts.constants, first.constants)
        except SizeError as error:
            raise self.explained(arena, error) from error
        for rows, table, given in arena.probes():
            with self._mode.autocast(rows.device.type):
                arguments = self._forward.arguments(rows, table, given, self._static_args)
                check_shared(arguments, partial(self._forward.run, arguments))
        return first.constants

    @contextmanager
    def _named(self, rows: Tensor, table: ItemTable) -> Iterator[None]:
        """Say of errors of the module, which the caller's own call may not raise, what it ran and why.

        Raises:
            CaptureError: The module raised something else than short memory.
        """
        try:
            yield
        except VarlenGraphsError:
            raise
        except Exception as error:
            if is_out_of_memory(error) or (rows.is_cuda and torch.cuda.is_current_stream_capturing()):
                raise  # what CUDA refuses in a recording, `CudaCapture` explains
            declared = self._forward.spec.advice(
                "something in the module has a size that follows neither from the rows nor from a declared buffer, or "
                "rows have another shape than vg.inputs.Rows(shape=...) declares, or the first call brought; "
                "vg.diagnose(module, calls) names what cannot be captured, and",
                "the module computes a size in another way than its recipe declares;",
            )
            raise CaptureError(
                f"{type(error).__name__}: {error}\n  at {raising_line(error.__traceback__)}\n"
                f"varlen_graphs ran the module with rows {list(rows.shape)}, items {table.budget.items}, for a "
                "capture: graphs run at such sizes whatever a call brings. If the error is about a number of items or "
                f"a shape, {declared} backend='eager' runs without graphs"
            ) from error

    def explained(self, arena: Arena, error: SizeError) -> VarlenGraphsError:
        """Return what says more about an output of another size than declared.

        If a run does what no graph can hold, from which the size may follow, that is it; else what the error suggests
        to declare fits all probes.
        """
        rules = CaptureRulesMode(arena.rows.device, "the module")
        found: list[tuple[Parts, Budget]] = []
        try:
            for rows, table, given in arena.probes():
                with self._mode.autocast(rows.device.type):
                    arguments = self._forward.arguments(rows, table, given, self._static_args)
                    output = rules.watch(partial(self._forward.run, arguments), fast_paths=False)
                found.append((flatten(output, self._forward.spec.declared), table.budget))
            for parts, budget in found:
                check_extents(parts, budget, [one for one in found if one[1] != budget])
        except VarlenGraphsError as more:
            return more
        except Exception:  # the same, or of a module that does not take all probes
            return error
        return error

    def run_probe(
        self, probe: tuple[Tensor, ItemTable, dict[str, Tensor]], which: int = 0, checked: bool = True
    ) -> Parts:
        """Run a few rows without padding, see `run_on_sample`."""
        rows, table, given = probe
        return run_on_sample(partial(self, table=table, compiled=False), rows, given, self._forward, which, checked)


def outputs_of(parts: Parts) -> list[Tensor]:
    """Return the outputs of a graph, as memory that a replay writes."""
    return [tensor.detach().resolve_conj().resolve_neg() for tensor in parts.tensors]
