"""One trial of the proof: an example replayed in one graph, and the evidence if that is wrong."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from varlen_graphs.errors import VerificationError
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.graphs.graph_set import GraphSet, reason_of
from varlen_graphs.graphs.row_source import NOWHERE
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.items import Layout
from varlen_graphs.layout.span import Span
from varlen_graphs.routing.packing import Pack
from varlen_graphs.serving.replayed_items import HostItems
from varlen_graphs.serving.results import Collected
from varlen_graphs.spec.call import Call
from varlen_graphs.spec.outputs import Parts, flatten, with_padding
from varlen_graphs.spec.reading import read_layout
from varlen_graphs.verify.compare import Expected, all_equal, few
from varlen_graphs.verify.error_locator import PADDING, REPEATED, ErrorLocator
from varlen_graphs.verify.examples import permuted
from varlen_graphs.verify.operations import random_draw
from varlen_graphs.watch.made_up_run import run_made_up

TOGETHER = (
    "The items of a call act on each other, so an item would change with the others that share its replay. Compute "
    "what they share outside of the module, or let items that belong together form a group."
)

NOISE = 8
"""Ratio of an accepted error to the change of the output when rows change by a rounding error."""


MOST_NOISE = 0.25
"""Largest error that is accepted for this reason."""


REPEATS = 16
"""Replays that must repeat, bit for bit, before a small change is put down to padding.

Sums in no fixed order, as of `index_add` on a GPU, change in some replays only.
"""


class Example(NamedTuple):
    """A call of made-up items, and its expected output.

    Attributes:
        call: The call.
        layout: Its items.
        expected: The expected output.
        against: What computed that, in words.
        output: The output of the declared forward, run eager without padding.
        by_references: True if the references of kernels computed that.
        has_indices: True on a GPU if some operator took indices there.
    """

    call: Call
    layout: Layout
    expected: Expected
    against: str
    output: Parts
    by_references: bool
    has_indices: bool

    def allowed(self, forward: Forward, limit: float, form: Parts) -> float:
        """Return the largest error that is allowed here: more than `limit` if changes by a rounding error cause more.

        They do in modules that round activations, such as quantised ones. Syncs.
        """
        rows, padded = self.call.rows, self.call.padded
        if not rows.is_floating_point():
            return limit
        noise = torch.randn(rows.shape, generator=torch.Generator(rows.device).manual_seed(1), device=rows.device)
        nudged = (rows * (1 + 2 * torch.finfo(rows.dtype).eps * noise)).to(rows.dtype)
        runs = [forward.exact(replace(self.call, rows=some)) for some in (rows, rows, nudged)]
        one, again, other = (Expected(output, self.layout, padded) for output in runs)
        repeats = one.differs_from(again, form) <= limit  # random numbers are no rounding
        return max(limit, min(MOST_NOISE, NOISE * one.differs_from(other, form))) if repeats else limit


class Trial:
    """Replays of an example in one graph.

    Args:
        forward: The forward of the graph.
        graphs: Its set.
        budget: Its budget.
        pool: The memory of the pool.
        example: The example.
        limit: Largest error allowed.
        reorder: If True, all items of the example and some are also replayed in another order.

    Attributes:
        budget, example: As given.
    """

    def __init__(
        self,
        forward: Forward,
        graphs: GraphSet,
        budget: Budget,
        pool: list[Tensor],
        example: Example,
        limit: float,
        reorder: bool,
    ) -> None:
        self._forward = forward
        self._graphs = graphs
        self.budget = budget
        self._pool = pool
        self.example = example
        self._limit = limit
        self._reorder = reorder

    def run(self) -> Tensor:
        """Return True, as bool `[]`, if all replays are right. No sync."""
        call, layout, expected, *_ = self.example
        over_nan, over_rows = self._replay(call), self._replay(call, clean=True)
        error = expected.largest(over_nan, layout, range(len(layout)))
        right = all_equal(over_nan.tensors, over_rows.tensors) & (error <= self._limit)
        for groups in self._orders():
            order, shuffled = permuted(self._forward.spec, call, layout, groups)
            error = expected.largest(self._replay(shuffled), read_layout(self._forward.spec, shuffled), order)
            right &= error <= self._limit
        return right

    def check_indices(self) -> None:
        """Run the forward eager if it takes indices on a GPU, and the example uses up something of the budget. Syncs.

        Behind the last item, indices may be out of range then, which replays do not check.

        Raises:
            Exception: One is, which in a replay would end the use of CUDA in the process.
        """
        rows, items, segments, _ = self._forward.spec.needs.load(self.example.layout)
        is_full = rows == self.budget.rows or items == self.budget.items or segments == self.budget.segments
        if self.example.has_indices and is_full and self._graphs.agreement.alone:
            self._load(self.example.call, clean=True)
            arena = self._graphs.arena
            arena.source.copy(self.budget.rows)
            forward = partial(self._forward, *arena.view(self.budget), self.example.call.statics)
            run_made_up(forward, arena.rows.device)

    def _orders(self) -> list[list[range]]:
        """Return the groups to replay from the last to the first: all, and some without the first and the extremes."""
        groups, rows = self.example.layout.groups, self.example.layout.group_rows
        if not self._reorder or len(groups) == 1:
            return []
        left_out = {0, rows.index(max(rows)), rows.index(min(rows))}
        return [groups, [group for at, group in enumerate(groups) if at not in left_out] or groups[1:]]

    def reference_repeats(self) -> bool:
        """Return True if what gave the expected output gives it again. Syncs.

        Torch's convolution of bfloat16 on the CPU, for example, reads memory that nobody wrote at some small sizes.
        """
        call, layout, expected, _, output, *_ = self.example
        again = (Expected(self._forward.reference(call).output, layout, call.padded) for _ in range(3))
        return all(expected.differs_from(one, output) <= self._limit for one in again)

    def find_evidence(self) -> None:
        """Replay the example again, and raise what is wrong. Sums whose order is not fixed are not wrong. Syncs.

        Raises:
            VerificationError: A replay is wrong; the message says where and why.
        """
        call, layout, expected, against, *_ = self.example
        items, limit = range(len(layout)), self._limit
        where = f"wrong in {self.budget}, replaying items {few(layout)}"
        over_nan = self._replay(call)
        limit = self.example.allowed(self._forward, limit, over_nan)
        found = expected.furthest(over_nan, layout, items, call.padded)
        if found.error > limit:
            what = f"{found.where} differs by {found.error:.1e} from {against} (tolerance {limit:.0e})"
            why = self._cause(lambda locator: locator.explain_error(expected, items, limit))
            raise VerificationError(f"{where}: {what}\n{why}")
        over_rows = self._replay(call, clean=True)
        first = Expected(over_nan.rebuild(over_nan.tensors), layout, call.padded)
        found = first.furthest(over_rows, layout, items, call.padded)
        repeats = all(
            all_equal(over_nan.tensors, self._replay(call).tensors)
            and all_equal(over_rows.tensors, self._replay(call, clean=True).tensors)
            for _ in range(REPEATS if found.error else 0)
        )
        if found.error > (0.0 if repeats else limit):
            what = f"{PADDING if repeats else REPEATED}: {found.where} differs by {found.error:.1e}"
            raise VerificationError(f"{where}: {what}\n{self._cause(ErrorLocator.explain_padding)}")
        for groups in self._orders():
            order, shuffled = permuted(self._forward.spec, call, layout, groups)
            shuffled_layout = read_layout(self._forward.spec, shuffled)
            found = expected.furthest(self._replay(shuffled), shuffled_layout, order, call.padded)
            if found.error > limit:
                what = f"{len(order)} of its items in another order: {found.where} differs by {found.error:.1e}"
                why = f"{TOGETHER}\n{self._cause(ErrorLocator.explain_together)}".rstrip()
                raise VerificationError(f"{where}: {what} (tolerance {limit:.0e})\n{why}")

    def _replay(self, call: Call, clean: bool = False) -> Parts:
        """Replay a call over NaN in the pool and in all padding, or over zeros in the pool and rows as padding."""
        items, spans = self._load(call, clean)
        graphs, collected = self._graphs, Collected(items.everything)
        collected.take(graphs.replay(self.budget), graphs.extents, spans)
        tensors = with_padding(collected.tensors, graphs.extents, items.layout, call.padded)
        return flatten(graphs.rebuild(tensors), self._forward.spec.declared)

    def _load(self, call: Call, clean: bool) -> tuple[HostItems, Sequence[tuple[Span, Span]]]:
        """Load a call over padding as in `_replay`; return its items, and their places in it and in the replay."""
        arena, spec = self._graphs.arena, self._forward.spec
        for memory in self._pool:
            memory.fill_(0 if clean else 0xFF)
        if clean:
            arena.fill(call)
        else:
            arena.poison()
        items, pack = HostItems(read_layout(spec, call)), Pack(self.budget, range(call.items))
        spans = items.spans(pack)
        source = arena.source.of(call, spans)
        items.load(arena, pack, source)
        arena.load_inputs(call, spans, self.budget)
        if source is NOWHERE:
            arena.load_rows(call, spans, self.budget)
        arena.keeps_padding = False
        return items, spans

    def _cause(self, explain: Callable[[ErrorLocator], str]) -> str:
        """Locate the cause of a wrong replay by running eager."""
        if not self._graphs.agreement.alone:  # ranks may take another course each, and then wait for each other
            return "The cause is not located where ranks share a module."
        call, layout, *_ = self.example
        try:
            if draw := random_draw(self._forward.module, partial(self._forward.exact, call)):
                return f"The module draws random numbers, so no two runs agree: {draw}\nCall module.eval() first."
            pack = Pack(self.budget, range(len(layout)))
            return explain(ErrorLocator(self._forward, self._graphs.arena, call, pack, call))
        except Exception as error:  # of the module's own code, or the device's memory
            return f"The cause could not be located: {reason_of(error)}"
