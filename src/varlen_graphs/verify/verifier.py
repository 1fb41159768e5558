"""Verify on example calls that replays reproduce the module's output, whatever padding and the pool hold."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from varlen_graphs.capture.pool import Pool
from varlen_graphs.errors import InputError, VerificationError
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.graphs.store import Captured
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.routing.packing import Pack
from varlen_graphs.routing.planner import Planner
from varlen_graphs.serving.replay import Replays
from varlen_graphs.spec.outputs import Parts, flatten
from varlen_graphs.stats import Stats
from varlen_graphs.verify.compare import Expected, few, limit_of
from varlen_graphs.verify.error_locator import DECLARED, PADDING, REPEATED, STATE, ErrorLocator
from varlen_graphs.verify.examples import VerificationCall, permuted

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
    """

    calls: int
    budgets: tuple[Budget, ...]
    unchecked: tuple[Budget, ...]
    error: float
    tolerance: float

    def __str__(self) -> str:
        unchecked = f" ({len(self.unchecked)} unchecked)" if self.unchecked else ""
        return (
            f"{self.calls} calls verified in {len(self.budgets)} budgets{unchecked}: largest error "
            f"{self.error:.1e}, tolerance {self.tolerance:.0e}"
        )


class Verifier:
    """Replays calls over NaN and over other rows, and compares the outputs with those of the module itself.

    Each call in `examples` is paired with a call of the same items and other rows.
    """

    def __init__(
        self,
        captured: Captured,
        forward: Forward,
        planner: Planner,
        pool: Pool,
        tolerance: float | None,
        examples: Sequence[tuple[VerificationCall, VerificationCall]],
    ) -> None:
        self._captured = captured
        self._forward = forward
        self._planner = planner
        self._pool = pool
        self._replays = Replays(captured, planner, forward, pool, Stats(), lends=False)
        self._examples = sorted(examples, key=lambda pair: pair[0].layout.size)
        self._largest = self._examples[-1][1]
        self._tolerance = limit_of(tolerance, forward, self._largest.call.rows.device)
        self._error = 0.0  # the largest so far

    def verify(self) -> Verified:
        """Verify the calls, from the smallest to the largest; raises as `GraphedEncoder.verify` does."""
        checked = set[Budget]()
        with torch.no_grad(), self._pool.exclusive():
            self._captured.check_memory()
            ways_of = [self._ways(example) for example, _ in self._examples]
            for (example, _), ways in zip(self._examples, ways_of, strict=True):
                if not ways:
                    raise InputError(f"no budget holds the items {few(example.layout)}: expected calls that fit one")
            for (example, other), ways in zip(self._examples, ways_of, strict=True):
                expected = self._expected(example, self._over_nan(example, ways[0]))
                expected_of_other = Expected(self._reference(other), other.layout, other.call.length)
                for packs in ways:
                    self._verify_replays(example, packs, expected)
                    self._check(other, packs, self._over_nan(other, packs), expected_of_other)
                    checked.update(one.budget for one in packs if one.budget is not None)
            self._captured.check_memory()
        unchecked = self._planner.costs.replays.keys() - checked
        budgets = tuple(sorted(checked)), tuple(sorted(unchecked))
        return Verified(len(self._examples), *budgets, self._error, self._tolerance)

    def _verify_replays(self, example: VerificationCall, packs: Sequence[Pack], expected: Expected) -> None:
        """Verify replays of a call over NaN, once more, over other rows, and with its items in another order."""
        over_nan = self._over_nan(example, packs)
        self._check(example, packs, over_nan, expected)
        again, over_rows = self._over_nan(example, packs), self._over_rows(example, packs)
        self._check_same(example, packs, over_nan, again, REPEATED, ErrorLocator.explain_repetition)
        self._check_same(example, packs, over_nan, over_rows, PADDING, ErrorLocator.explain_padding)
        order, shuffled = permuted(example)
        shuffled_packs = [Pack(one.budget, sorted(map(order.index, one.items))) for one in packs]
        self._check(shuffled, shuffled_packs, self._over_nan(shuffled, shuffled_packs), expected, order)

    def _ways(self, example: VerificationCall) -> list[Sequence[Pack]]:
        """Return the ways to replay a call: whole in each budget that holds it, and split if it would be split."""
        load, everything = self._forward.spec.needs.load(example.layout), range(len(example.layout))
        budgets = [budget for budget in sorted(self._planner.costs.replays) if budget.holds(*load)]
        ways: list[Sequence[Pack]] = [[Pack(budget, everything)] for budget in budgets]
        packs = self._planner.packs(example.layout)
        return [packs, *ways] if len(packs) > 1 and any(one.budget for one in packs) else ways

    def _reference(self, example: VerificationCall) -> Any:
        try:
            return self._forward.reference(example.call, example.layout)
        except Exception as error:
            error.add_note("varlen_graphs ran the module itself with a call to verify; pass calls that it accepts")
            raise

    def _expected(self, example: VerificationCall, form: Parts) -> Expected:
        """Return the output of the module itself; raise if the module changes its state or a second run differs."""
        state = dict([*self._forward.module.named_parameters(), *self._forward.module.named_buffers()])
        versions = {name: tensor._version for name, tensor in state.items() if not tensor.is_inference()}
        expected, again = [Expected(self._reference(example), example.layout, example.call.length) for _ in range(2)]
        changed = [name for name, version in versions.items() if state[name]._version != version]
        if changed:
            raise VerificationError(
                f"the module changes {', '.join(changed)} in place, so its output depends on earlier calls; call "
                "module.eval(), or compute in each call everything that depends on the call"
            )
        if expected.differs_from(again, form) > self._tolerance:
            raise VerificationError(STATE)
        return expected

    def _replay(self, example: VerificationCall, packs: Sequence[Pack]) -> Parts:
        output = self._replays.run(example.call, example.layout, packs, example.backend)
        return flatten(output, self._forward.spec.declared)

    def _over_nan(self, example: VerificationCall, packs: Sequence[Pack]) -> Parts:
        """Replay with NaN in all padding and in the pool."""
        self._captured.poison()
        return self._replay(example, packs)

    def _over_rows(self, example: VerificationCall, packs: Sequence[Pack]) -> Parts:
        """Replay with rows of the largest call in all padding, and leftovers of its replay in the pool."""
        self._replay(self._largest, self._ways(self._largest)[-1])
        if self._captured.arena is not None:
            self._captured.arena.fill(self._largest.call.rows)
        return self._replay(example, packs)

    def _check(
        self,
        example: VerificationCall,
        packs: Sequence[Pack],
        came: Parts,
        expected: Expected,
        order: Sequence[int] = (),
    ) -> None:
        """Check the output of a replay, whose items may be in another order than those of the call."""
        items = order or range(len(example.layout))
        found = expected.furthest(came, example.layout, items, example.call.length)
        self._error = max(self._error, found.error)
        if found.error > self._tolerance:
            what = f"{found.where} differs by {found.error:.1e} from the module's own output (tolerance "
            what += f"{self._tolerance:.0e}{', items in another order' if order else ''})"
            pack = next(one for one in packs if items.index(found.item) in one.items)

            def why(locator: ErrorLocator) -> str:
                return locator.explain_error(expected, [items[i] for i in pack.items], self._tolerance)

            self._refuse(example, pack, what, why)

    def _check_same(
        self, example: VerificationCall, packs: Sequence[Pack], one: Parts, other: Parts, what: str, why: Why
    ) -> None:
        """Check that two replays of a call gave the same bits."""
        call, layout = example.call, example.layout
        first = Expected(one.rebuild(one.tensors), layout, call.length)
        found = first.furthest(other, layout, range(len(layout)), call.length)
        if found.error > 0:
            pack = next(pack for pack in packs if found.item in pack.items)
            self._refuse(example, pack, f"{what}: {found.where} differs by {found.error:.1e}", why)

    def _refuse(self, example: VerificationCall, pack: Pack, what: str, why: Why) -> NoReturn:
        call, arena = example.call, self._captured.arena
        where = f"an eager run of items {few(example.layout)}"
        cause = DECLARED
        if pack.budget is not None and arena is not None:
            where = f"{pack.budget}, replaying items {few(pack.layout(example.layout))}"
            filling = self._largest.call.rows
            cause = why(ErrorLocator(self._forward, arena, call, example.layout, pack, pack.budget, filling))
        raise VerificationError(f"wrong in {where}: {what}\n{cause}")
