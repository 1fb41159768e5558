"""Locate the cause of a wrong replay by rerunning its forward eagerly."""

import sys
from dataclasses import replace
from functools import partial
from typing import Any

from varlen_graphs.declaration.call import Call
from varlen_graphs.declaration.part import part_of
from varlen_graphs.graphs.arena import Arena
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.layouts.item_slice import ItemSlice
from varlen_graphs.outputs.parts import clear_gaps, flatten
from varlen_graphs.routing.packing import ReplayBatch
from varlen_graphs.torch_dispatch.checked_indices import run_checked
from varlen_graphs.verify.compare import Example, close, equal
from varlen_graphs.verify.mixing import Inputs, explain_together
from varlen_graphs.verify.operations import DifferingOperation, Run, Same, first_difference
from varlen_graphs.verify.wrong_buffers import wrong_buffers

FROZEN = (
    "An eager run of the same code on the same padded memory gives the right output, so the graph holds a value that "
    "has changed since the capture: a Python number or branch, a cache, or compiled code."
)
FROM_ITEMS = "Compute it from the items, in a declared buffer."
KERNELS = (
    "Or it launches a Triton kernel outside of any operator: the tape does not see what that writes. Wrap the launch "
    "in torch.library.custom_op, with a fake kernel, which torch.compile needs as well."
)
DECLARED = (
    "An eager run of the declared buffers and forward=, without padding, is wrong too: they compute something other "
    "than the module itself."
)
MEMORY = (
    "Eager runs do not differ, so a replay reads memory that it did not write: a tensor made with empty(), or a cache "
    "that was filled during the capture."
)
STATE = (
    "The module itself gives a different output when the same call is repeated: it keeps state between calls, or draws "
    "random numbers. Call module.eval(), and compute in each call everything that depends on the call."
)
REPEATED = "two replays of one call over the same memory differ"
PADDING = "the contents of padding change active rows"
REMEDY = (
    "Rows may mix only through declared buffers: attention over cu_seqlens, gathers by declared indices, sums by item "
    "that leave padding out."
)
REPORT = (
    "Run it without graphs (backend='eager', or vg.unwrap(model)), and report it: its recipe is wrong for this module."
)


class ErrorLocator:
    """Reruns the forward of one replay eagerly: at its budget over rows of `filling` and over NaN, and unpadded.

    Leaves NaN in the padding of the arena.
    """

    def __init__(self, forward: Forward, arena: Arena, call: Call, batch: ReplayBatch, filling: Call) -> None:
        layout, budget = call.layout, batch.budget
        assert layout is not None  # noqa: S101 - the call was bound for verification
        assert budget is not None  # noqa: S101 - it was replayed
        self._forward = forward
        self._call = call
        self._static_args = call.static_args
        self._part = batch.layout(layout)
        slices = batch.slices(layout, ItemSlice.of(layout))
        arena.load_layout(self._part, budget)
        own, self._table, given = arena.view(budget)
        self._padded: list[Inputs] = []
        for fill in (partial(arena.fill, filling), arena.poison):
            fill()
            arena.load_inputs(call, slices, budget)
            arena.load_rows(call, slices, budget)
            self._padded.append((own.clone(), {name: tensor.clone() for name, tensor in given.items()}))
        arena.keeps_padding = False
        self._items = batch.items
        self._active = replace(part_of(self._forward.spec, call, self._part, slices), padded=())
        own_batch = (len(self._part), self._part.length)
        self._batches = (own_batch, (budget.items, budget.max_seqlen)) if self._part.length else None

    def check_indices(self) -> None:
        """Run at the budget over rows of `filling`, where indices behind the last item may be out of range. Syncs.

        Raises:
            Exception: One is, which in a replay would end the use of CUDA in the process.
        """
        run_checked(partial(self._at_budget, 0), self._call.rows.device)

    def explain_error(self, example: Example, limit: float) -> str:
        """Explain why the replay differs from the expected output of the call by more than `limit`."""

        def is_right(output: Any, clear: bool) -> bool:
            parts = flatten(output, self._forward.spec.declared)
            if clear:
                clear_gaps(parts, self._table)
            return example.furthest(parts, self._active, self._items).error <= limit

        if is_right(self._at_budget(1), clear=True):
            on_tape = self._call.rows.device.type == "cpu"
            kernels = KERNELS if on_tape and "triton" in sys.modules else ""
            return f"{FROZEN} {self._forward.spec.advice(FROM_ITEMS, REPORT)}\n{kernels}".rstrip()
        if not is_right(self._exact(), clear=False):
            whole = [*self._items] == [*range(self._call.items)]
            named = wrong_buffers(self._forward, example, limit) if whole else ""
            return f"{DECLARED} {named}".rstrip()
        at_budget, same = partial(self._at_budget, 1), partial(close, limit=limit)
        found = self._changed_by_padding() or self._first_difference(self._exact, at_budget, same)
        found = found or self._first_difference(self._exact, at_budget, same, views=True)
        if found is None:
            return MEMORY
        right = "Without padding the output is right. The first operation with a wrong result at the budget is"
        return f"{right} {found}\n{self._forward.spec.advice(REMEDY, REPORT)}"

    def explain_padding(self) -> str:
        """Explain why a replay depends on the contents of padding."""
        found = self._changed_by_padding()
        if found is None:
            return MEMORY
        remedy = self._forward.spec.advice(REMEDY, REPORT)
        return f"The first operation whose active rows change with the padding is {found}\n{remedy}"

    def explain_repetition(self) -> str:
        """Explain why two replays over the same memory differ."""
        run = partial(self._at_budget, 1)
        found = self._first_difference(run, run, equal)
        if found is None:
            return MEMORY
        return (
            f"The first operation whose result changes when it is repeated is {found}\nThe module changes state in "
            "place, or the order of its sums is not fixed; see torch.use_deterministic_algorithms."
        )

    def explain_together(self) -> str:
        """Explain how items of the replay act on each other; empty if they do not."""
        return explain_together(self._forward, self._part, self._run, self._padded[0])

    def _changed_by_padding(self) -> DifferingOperation | None:
        """Find the first operation whose active rows change with what padding holds, or would hold uncleared."""
        clean, poisoned = self._padded
        others = partial(self._run, poisoned), partial(self._run, clean, clears=False)
        found = (self._first_difference(partial(self._run, clean), other, equal) for other in others)
        return next((one for one in found if one is not None), None)

    def _first_difference(self, one: Run, other: Run, same: Same, views: bool = False) -> DifferingOperation | None:
        return first_difference(self._forward.module, self._exact, one, other, same, self._batches, views)

    def _at_budget(self, which: int) -> Any:
        return self._run(self._padded[which])

    def _run(self, inputs: Inputs, clears: bool = True) -> Any:
        """Run the forward at the budget; without `clears`, over what lies around all items in the arena."""
        rows, given = inputs
        given = {name: tensor.clone() for name, tensor in given.items()}
        arguments = self._forward.arguments(rows.clone(), self._table, given, self._static_args)
        packed, extent = self._forward.spec.row_input, self._forward.spec.row_extent
        cleared = packed.rows_first(arguments[packed.name])
        passed = (cleared if clears or packed.normalize else rows).clone()
        own, cleared = (extent.part(tensor, ItemSlice.of(self._part)) for tensor in (passed, cleared))
        own.copy_(cleared)  # in any case, so that the operations are the same
        arguments[packed.name] = packed.as_argument(passed).contiguous()
        return self._forward.run(arguments)

    def _exact(self) -> Any:
        return self._forward.exact(self._active)
