"""Proves on example calls that replays give what the module gives, whatever padding and the pool hold."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from varlen_graphs.errors import InputError, VerificationError, counted
from varlen_graphs.graphs.graph_set import GraphSet
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.layout.items import Layout
from varlen_graphs.routing.packing import Pack
from varlen_graphs.routing.router import Route
from varlen_graphs.serving.execute import Executor
from varlen_graphs.spec.call import Call
from varlen_graphs.spec.outputs import Parts, flatten
from varlen_graphs.stats import Stats
from varlen_graphs.verify.compare import Expected, few, limit_of
from varlen_graphs.verify.error_locator import DECLARED, PADDING, REPEATED, STATE, ErrorLocator
from varlen_graphs.verify.examples import permuted
from varlen_graphs.watch.shadow import Shadow

Packs = Sequence[Pack]
Why = Callable[[ErrorLocator], str]


@dataclass(frozen=True)
class Verified:
    """Result of a successful `GraphedEncoder.verify`.

    Attributes:
        calls: Number of calls that were replayed.
        budgets: Budgets that they were replayed in.
        unchecked: Enabled budgets that none of the calls fits as a whole.
        error: Largest error of any item, in any tensor of the output: relative L2.
        tolerance: Largest error allowed.
        against: The references that replays were compared with, in words: the module itself, or an eager run of the
            declared forward for calls that the module does not take.
    """

    calls: int
    budgets: tuple[Budget, ...]
    unchecked: tuple[Budget, ...]
    error: float
    tolerance: float
    against: tuple[str, ...]

    def __str__(self) -> str:
        unchecked = f" ({len(self.unchecked)} unchecked)" if self.unchecked else ""
        return (
            f"{counted(self.calls, 'call')} verified in {counted(len(self.budgets), 'budget')}{unchecked}: largest "
            f"error {self.error:.1e}, tolerance {self.tolerance:.0e}; compared with {'; and with '.join(self.against)}"
        )


class Verifier:
    """Replays calls over NaN and over the rows of others, and compares with the module itself, if it takes them.

    Each example is a call and another one of the same items and other rows; the host knows their items.
    """

    def __init__(self, executor: Executor, tolerance: float | None, examples: Sequence[tuple[Call, Call]]) -> None:
        self._store = executor.store
        self._forward = executor.forward.on(Shadow(executor.forward.module))
        self._spec = executor.spec
        self._router = executor.router
        self._executor = Executor(executor.signature, executor.mode, executor.router, executor.store, Stats())
        self._examples = sorted(examples, key=lambda pair: layout_of(pair[0]).size)
        self._largest = self._examples[-1][1]
        self._tolerance = limit_of(tolerance, self._forward, self._largest.rows.device)
        self._error = 0.0  # the largest so far
        self._against = dict[str, None]()  # in the order of the calls

    def verify(self) -> Verified:
        """Verify the calls, from the smallest to the largest."""
        checked = set[Budget]()
        with torch.no_grad(), self._store.pool.exclusive(), self._store.pool.order:
            self._store.check_memory()
            routes_of = [self._routes(call) for call, _ in self._examples]
            for (call, _), routes in zip(self._examples, routes_of, strict=True):
                if not routes:
                    raise InputError(f"no budget holds the items {few(layout_of(call))}: expected calls that fit one")
            for (call, other), routes in zip(self._examples, routes_of, strict=True):
                expected = self._expected(call, self._over_nan(call, routes[0]))
                expected_of_other = Expected(self._reference(other), layout_of(other), other.padded)
                for packs in routes:
                    self._verify_replays(call, packs, expected)
                    self._check(other, packs, self._over_nan(other, packs), expected_of_other)
                    checked.update(pack.budget for pack in packs if pack.budget is not None)
            self._store.check_memory()
        unchecked = self._store.budgets.costs.replays.keys() - checked
        budgets = tuple(sorted(checked)), tuple(sorted(unchecked))
        return Verified(len(self._examples), *budgets, self._error, self._tolerance, tuple(self._against))

    def _verify_replays(self, call: Call, packs: Packs, expected: Expected) -> None:
        """Replay a call over NaN, again, over rows of another, and with its items in another order."""
        over_nan = self._over_nan(call, packs)
        self._check(call, packs, over_nan, expected)
        again, over_rows = self._over_nan(call, packs), self._over_rows(call, packs)
        self._check_same(call, packs, over_nan, again, REPEATED, ErrorLocator.explain_repetition)
        self._check_same(call, packs, over_nan, over_rows, PADDING, ErrorLocator.explain_padding)
        order, shuffled = permuted(self._spec, call, layout_of(call))
        shuffled_packs = [Pack(pack.budget, sorted(map(order.index, pack.items))) for pack in packs]
        self._check(shuffled, shuffled_packs, self._over_nan(shuffled, shuffled_packs), expected, order)

    def _routes(self, call: Call) -> list[Packs]:
        """Return the ways to replay a call: whole in every budget that holds it, and split if its route splits it."""
        layout, costs = layout_of(call), self._store.budgets.costs
        load, everything = self._spec.needs.load(layout), range(len(layout))
        graphs = self._store.find(call.key)
        refused = {} if graphs is None else graphs.refused
        budgets = [budget for budget in sorted(costs.replays) if budget.holds(*load)]
        if failed := [refused[budget] for budget in budgets if budget in refused]:
            raise VerificationError(failed[0])
        ways: list[Packs] = [[Pack(budget, everything)] for budget in budgets]
        key, size = self._store.key(call.key), self._spec.exact_budget(layout)
        if self._store.capturer.exact.get((key, size)) and size not in budgets:
            ways.append([Pack(size, everything)])
        packs = self._router.route(call, costs, timed=False).packs
        return [packs, *ways] if len(packs) > 1 else ways

    def _graphs(self, call: Call, packs: Packs) -> GraphSet | None:
        """Return the graphs that packs replay: those of the budgets, or the one of exactly the size of the call."""
        graphs, budget = self._store.find(call.key), packs[0].budget
        if graphs is None or budget is None or budget in graphs:
            return graphs
        return self._store.capturer.exact.get((self._store.key(call.key), budget), graphs)

    def _reference(self, call: Call) -> Any:
        try:
            output, against = self._forward.reference(call)
        except Exception as error:
            error.add_note("varlen_graphs ran the module itself with a call to verify; pass calls that it accepts")
            raise
        self._against[against] = None
        return output

    def _expected(self, call: Call, form: Parts) -> Expected:
        """Return the expected output, in the form of a replay; check that it is the same whenever it is asked."""
        state = dict([*self._forward.module.named_parameters(), *self._forward.module.named_buffers()])
        versions = {name: tensor._version for name, tensor in state.items() if not tensor.is_inference()}
        expected, again = [Expected(self._reference(call), layout_of(call), call.padded) for _ in range(2)]
        changed = [name for name, version in versions.items() if state[name]._version != version]
        if changed:
            raise VerificationError(
                f"the module changes {', '.join(changed)} in place, so its output depends on earlier calls; call "
                "module.eval(), or compute in each call everything that depends on the call"
            )
        if expected.differs_from(again, form) > self._tolerance:
            raise VerificationError(STATE)
        return expected

    def _replay(self, call: Call, packs: Packs) -> Parts:
        graphs = self._graphs(call, packs)
        if graphs is None:
            raise InputError("there is nothing to verify: no graph is left")
        return flatten(self._executor.replay(call, Route(packs), graphs), self._spec.declared)

    def _over_nan(self, call: Call, packs: Packs) -> Parts:
        """Replay with NaN in all padding and in the pool."""
        self._store.poison()
        output = self._replay(call, packs)
        for arena in self._store.capturer.arenas.values():  # those of rows of other shapes
            arena.keeps_padding = False
        return output

    def _over_rows(self, call: Call, packs: Packs) -> Parts:
        """Replay with rows of the largest call in all padding, over what a replay of it left in the pool."""
        self._replay(self._largest, self._routes(self._largest)[-1])
        if (graphs := self._graphs(call, packs)) is not None:
            graphs.arena.fill(self._filling(call))
        return self._replay(call, packs)

    def _filling(self, call: Call) -> Call:
        """Return the call whose rows are to lie in the padding of another: the largest one, if its rows fit there."""
        return self._largest if self._largest.rows.shape[1:] == call.rows.shape[1:] else call

    def _check(self, call: Call, packs: Packs, output: Parts, expected: Expected, order: Sequence[int] = ()) -> None:
        """Check the output of a replay of a call, whose items it may have in another order."""
        layout = layout_of(call)
        items = order or range(len(layout))
        found = expected.furthest(output, layout, items, call.padded)
        self._error = max(self._error, found.error)
        if found.error > self._tolerance:
            what = f"{found.where} differs by {found.error:.1e} from {'; '.join(self._against)} (tolerance "
            what += f"{self._tolerance:.0e}{', items in another order' if order else ''})"
            pack = next(pack for pack in packs if items.index(found.item) in pack.items)

            def why(locator: ErrorLocator) -> str:
                return locator.explain_error(expected, [items[i] for i in pack.items], self._tolerance)

            self._refuse(call, pack, what, why)

    def _check_same(self, call: Call, packs: Packs, one: Parts, other: Parts, what: str, why: Why) -> None:
        """Check that two replays of a call gave the same bits."""
        layout = layout_of(call)
        first = Expected(one.rebuild(one.tensors), layout, call.padded)
        found = first.furthest(other, layout, range(len(layout)), call.padded)
        if found.error > 0:
            pack = next(pack for pack in packs if found.item in pack.items)
            self._refuse(call, pack, f"{what}: {found.where} differs by {found.error:.1e}", why)

    def _refuse(self, call: Call, pack: Pack, what: str, why: Why) -> NoReturn:
        layout, graphs = layout_of(call), self._graphs(call, [pack])
        where = f"an eager run of items {few(layout)}"
        cause = DECLARED
        if pack.budget is not None and graphs is not None:
            where = f"{pack.budget}, replaying items {few(pack.layout(layout))}"
            cause = why(ErrorLocator(self._forward, graphs.arena, call, pack, self._filling(call)))
        raise VerificationError(f"wrong in {where}: {what}\n{cause}")


def layout_of(call: Call) -> Layout:
    """Return the items of an example call, which the host knows."""
    assert call.layout is not None  # noqa: S101 - examples are bound so
    return call.layout
