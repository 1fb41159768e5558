"""Proves on example calls that replays give what the module gives, whatever padding and the pool hold."""

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
from varlen_graphs.verify.diagnosis import DECLARED, PADDING, REPEATED, STATE, Diagnosis
from varlen_graphs.verify.examples import Example, permuted

Why = Callable[[Diagnosis], str]


@dataclass(frozen=True)
class Verified:
    """What `GraphedEncoder.verify` found right.

    Attributes:
        calls: How many calls were replayed.
        budgets: The budgets they were replayed in.
        unchecked: The budgets in use that hold none of them whole.
        error: The largest relative L2 of any item, in any tensor of the output.
        tolerance: What it was held against.
    """

    calls: int
    budgets: tuple[Budget, ...]
    unchecked: tuple[Budget, ...]
    error: float
    tolerance: float

    def __str__(self) -> str:
        unchecked = f"; {len(self.unchecked)} hold none of them" if self.unchecked else ""
        return (
            f"{self.calls} calls are right in {len(self.budgets)} budgets{unchecked}; the largest error is "
            f"{self.error:.1e}, the tolerance {self.tolerance:.0e}"
        )


class Verifier:
    """Replays calls over NaN and over the rows of others, and compares with the module itself.

    Args:
        captured: Where graphs and arena come from.
        forward: Runs the module.
        planner: Chooses budgets.
        pool: Whose turn is kept.
        tolerance: How far an output may be from the module's own; `None` is what the dtype asks for.
        examples: The calls, each with another one of the same items and other rows.
    """

    def __init__(
        self,
        captured: Captured,
        forward: Forward,
        planner: Planner,
        pool: Pool,
        tolerance: float | None,
        examples: Sequence[tuple[Example, Example]],
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
        """Verify the calls, from the smallest to the largest.

        Raises:
            InputError: A call that no budget holds.
            VerificationError: Something is wrong; the message has the evidence.
            StaleGraphError: Weights were moved or replaced since the capture.
        """
        checked = set[Budget]()
        with torch.no_grad(), self._pool.exclusive():
            self._captured.check_memory()
            ways_of = [self._ways(example) for example, _ in self._examples]
            for (example, _), ways in zip(self._examples, ways_of, strict=True):
                if not ways:
                    raise InputError(f"no budget holds {few(example.layout)}: expected calls that graphs answer")
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

    def _verify_replays(self, example: Example, packs: Sequence[Pack], expected: Expected) -> None:
        """Replay a call over NaN, again, over rows of another, and with its items in another order."""
        over_nan = self._over_nan(example, packs)
        self._check(example, packs, over_nan, expected)
        again, over_rows = self._over_nan(example, packs), self._over_rows(example, packs)
        self._check_same(example, packs, over_nan, again, REPEATED, Diagnosis.of_repetition)
        self._check_same(example, packs, over_nan, over_rows, PADDING, Diagnosis.of_padding)
        order, shuffled = permuted(example)
        shuffled_packs = [Pack(one.budget, sorted(map(order.index, one.items))) for one in packs]
        self._check(shuffled, shuffled_packs, self._over_nan(shuffled, shuffled_packs), expected, order)

    def _ways(self, example: Example) -> list[Sequence[Pack]]:
        """The ways to replay a call: whole in every budget that holds it, and split if its plan is to split it."""
        load, everything = self._forward.spec.needs.load(example.layout), range(len(example.layout))
        budgets = [budget for budget in sorted(self._planner.costs.replays) if budget.holds(*load)]
        ways: list[Sequence[Pack]] = [[Pack(budget, everything)] for budget in budgets]
        packs = self._planner.packs(example.layout)
        return [packs, *ways] if len(packs) > 1 and any(one.budget for one in packs) else ways

    def _reference(self, example: Example) -> Any:
        try:
            return self._forward.reference(example.call, example.layout)
        except Exception as error:
            error.add_note("varlen_graphs ran the module itself with a call to verify; give calls that it answers")
            raise

    def _expected(self, example: Example, form: Parts) -> Expected:
        """What the module itself gives of a call, in the form of a replay of it: the same whenever it is asked."""
        state = dict([*self._forward.module.named_parameters(), *self._forward.module.named_buffers()])
        versions = {name: tensor._version for name, tensor in state.items() if not tensor.is_inference()}
        expected, again = [Expected(self._reference(example), example.layout, example.call.length) for _ in range(2)]
        changed = [name for name, version in versions.items() if state[name]._version != version]
        if changed:
            raise VerificationError(
                f"the module changes {', '.join(changed)} in place, so what it gives depends on the calls before; call "
                "module.eval(), or compute anew in each call what depends on the call"
            )
        if expected.differs_from(again, form) > self._tolerance:
            raise VerificationError(STATE)
        return expected

    def _replay(self, example: Example, packs: Sequence[Pack]) -> Parts:
        output = self._replays.run(example.call, example.layout, packs, example.backend)
        return flatten(output, self._forward.spec.declared)

    def _over_nan(self, example: Example, packs: Sequence[Pack]) -> Parts:
        """Replay with NaN in all padding and in the pool."""
        self._captured.poison()
        return self._replay(example, packs)

    def _over_rows(self, example: Example, packs: Sequence[Pack]) -> Parts:
        """Replay with rows of the largest call in all padding, over what a replay of it left in the pool."""
        self._replay(self._largest, self._ways(self._largest)[-1])
        if self._captured.arena is not None:
            self._captured.arena.fill(self._largest.call.rows)
        return self._replay(example, packs)

    def _check(
        self, example: Example, packs: Sequence[Pack], came: Parts, expected: Expected, order: Sequence[int] = ()
    ) -> None:
        """Whether a replay gave what is expected of a call, whose items it may have in another order."""
        items = order or range(len(example.layout))
        found = expected.furthest(came, example.layout, items, example.call.length)
        self._error = max(self._error, found.error)
        if found.error > self._tolerance:
            what = f"{found.where} is {found.error:.1e} from what the module itself gives (tolerance "
            what += f"{self._tolerance:.0e}{', items in another order' if order else ''})"
            pack = next(one for one in packs if items.index(found.item) in one.items)

            def why(diagnosis: Diagnosis) -> str:
                return diagnosis.of_error(expected, [items[i] for i in pack.items], self._tolerance)

            self._refuse(example, pack, what, why)

    def _check_same(
        self, example: Example, packs: Sequence[Pack], one: Parts, other: Parts, what: str, why: Why
    ) -> None:
        """Whether two replays of a call gave the same bits."""
        call, layout = example.call, example.layout
        first = Expected(one.rebuild(one.tensors), layout, call.length)
        found = first.furthest(other, layout, range(len(layout)), call.length)
        if found.error > 0:
            pack = next(pack for pack in packs if found.item in pack.items)
            self._refuse(example, pack, f"{what}: {found.where} by {found.error:.1e}", why)

    def _refuse(self, example: Example, pack: Pack, what: str, why: Why) -> NoReturn:
        call, arena = example.call, self._captured.arena
        where = f"a run without a graph, of items {few(example.layout)}"
        cause = DECLARED
        if pack.budget is not None and arena is not None:
            where = f"{pack.budget}, replaying items {few(pack.layout(example.layout))}"
            filling = self._largest.call.rows
            cause = why(Diagnosis(self._forward, arena, call, example.layout, pack, pack.budget, filling))
        raise VerificationError(f"wrong in {where}: {what}\n{cause}")
