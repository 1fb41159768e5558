"""Examples where no call brought one: synthetic calls, with what the module itself gives for them."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from varlen_graphs.declaration.call import Call
from varlen_graphs.declaration.reading import read_layout
from varlen_graphs.errors import VerificationError, counted
from varlen_graphs.graphs.forward import DECLARATION, MODULE, Forward
from varlen_graphs.graphs.graph_set import CaptureInputs
from varlen_graphs.graphs.output_form import check_constants
from varlen_graphs.kernels.operator import references
from varlen_graphs.layouts.items import Layout
from varlen_graphs.outputs.parts import Parts, flatten
from varlen_graphs.torch_dispatch.checked_indices import CheckedIndices, run_checked
from varlen_graphs.verify.compare import MOST_NAN, Example, nan_shares
from varlen_graphs.verify.synthetic_calls import Kind, SyntheticCalls

BLIND = (
    "all floating outputs are NaN for all synthetic rows, which shows nothing; capture with a call of yours, "
    "encoder.capture(call), or pass verify=vg.options.Verify(at_capture=False), and verify graphs with "
    "encoder.verify(calls)"
)

MOST_SECONDS = 3.0
"""Seconds that an eager run may take which shows what the replays of graphs do not; there are up to twenty."""


class SampleRun(NamedTuple):
    """An example that no caller brought.

    Attributes:
        example: The example.
        output: The output of the declared forward, run eager without padding.
        by_references: True if the references of kernels computed that.
        has_indices: True on a GPU if some operator took indices there.
    """

    example: Example
    output: Parts
    by_references: bool
    has_indices: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and the outputs."""
        call = self.example.call
        return sum(one.nbytes for one in (call.rows, *call.inputs.values(), *2 * self.output.tensors))


class Samples:
    """Makes examples of items that a module takes.

    Args:
        forward: The forward over a shadow of the module.
        inputs: The static arguments, the shape of rows, and the device.
        call: The call to take rows from; `None` if there is none.
        constants: The Python values that graphs return.

    Attributes:
        calls: Makes the calls.
        known: Samples by their items, of plain kind.
        seconds_per_row: Time of a run, at least; 0 before there is any.
    """

    def __init__(self, forward: Forward, inputs: CaptureInputs, call: Call | None, constants: Sequence[Any]) -> None:
        self._forward = forward
        self._constants = constants
        self.calls = SyntheticCalls(forward, inputs, call)
        self.known: dict[Layout, SampleRun] = {}
        self.seconds_per_row = 0.0

    def first(
        self, layouts: Iterable[Layout], kind: Kind = "plain", by_module: bool = False, itself: bool = True
    ) -> SampleRun:
        """Return a call of the first items that the declared forward takes; `by_module` of the first that both take.

        And whose output is not NaN, if that can be: any NaN equals it.

        Args:
            layouts: Items, the best first.
            kind: Kind of rows.
            by_module: If True, the module itself should take them as well.
            itself: If False, the declared forward tells what is right, not the module.

        Raises:
            SpecError: The output holds other Python values than those that graphs return.
            Exception: The error of the first layout, if the forward takes none.
        """
        declared: SampleRun | None = None
        blind: SampleRun | None = None  # some output of it is NaN, but not all are
        error: Exception | None = None
        known = self.known if kind == "plain" and itself else {}
        run = partial(self._run, itself=itself, alone=kind == "uneven")
        for layout in layouts:
            if layout in known:
                if not (by_module and self._declares(known[layout].example)):
                    return known[layout]
                declared = declared or known[layout]
                continue
            for sample in map(run, self.calls.of(layout, kind)):
                if isinstance(sample, Exception):
                    error = error or sample
                    continue
                check_constants(sample.output.constants, self._constants)
                worst, best = nan_shares(sample.output.tensors)
                if worst > MOST_NAN:
                    error = error or VerificationError(BLIND)
                    blind = blind or (sample if best <= MOST_NAN else None)
                elif by_module and self._declares(sample.example):
                    declared = declared or sample
                else:
                    known[layout] = sample
                    return sample
        if (other := declared or blind) is None:
            raise error or LookupError("there is no layout to try")
        known[other.example.layout] = other
        return other

    def _declares(self, example: Example) -> bool:
        """Return True if the declared forward gave what the module itself should have given."""
        return example.against == DECLARATION and self._forward.answers_itself(example.call)

    def affordable(self, layouts: Iterable[Layout], alone: bool) -> tuple[Iterable[Layout], str | None]:
        """Return the layouts an eager run of which does not take too long, and what the shortest is if none does not.

        Ranks, whose clocks differ, take all.
        """
        rate, too_long = self.seconds_per_row if alone else 0.0, list[int]()
        for layout in (rest := iter(layouts)):
            if layout.size * rate <= MOST_SECONDS:
                return chain([layout], (one for one in rest if one.size * rate <= MOST_SECONDS)), None
            too_long.append(layout.size)
        if not too_long:
            return (), None
        rows = min(too_long)
        return (), f"{counted(rows, 'row')} at a time, an eager run of which takes some {rows * rate:.0f} s"

    def _run(self, call: Call, itself: bool, alone: bool = False) -> SampleRun | Exception:
        """Return a call with the output of the module itself, or of the forward if it cannot run with these arguments.

        Without `itself`, of the forward in any case: with the references of all kernels, unless nothing but the forward
        is compared with it `alone`.

        The forward runs in any case: what it refuses eager, no graph may do. Returns the error of the module, or of a
        function in the declaration.
        """
        try:
            layout, spec, example = read_layout(self._forward.spec, call), self._forward.spec, None
            run = partial(run_checked, device=call.rows.device, mode=(mode := CheckedIndices()))
            if itself and self._forward.answers_itself(call):
                with suppress(Exception), self._timed(layout.size):  # it may need more than these arguments
                    example = Example(call, run(partial(self._forward.answer, call)), MODULE)
            by_references = example is None and not alone
            with references() if by_references else nullcontext(), self._timed(layout.size):
                output = run(partial(self._forward.exact, call))
            against = MODULE if self._forward.is_module else DECLARATION
            example = example or Example(call, output, against)
            return SampleRun(example, flatten(output, spec.declared), by_references, mode.has_indices)
        except Exception as error:
            return error

    @contextmanager
    def _timed(self, rows: int) -> Iterator[None]:
        """Note how long a run of so many rows takes."""
        start = time.perf_counter()
        yield
        own = (time.perf_counter() - start) / rows
        self.seconds_per_row = min(own, self.seconds_per_row or own)
