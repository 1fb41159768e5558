"""Verify on a user's calls that graphs return what the module returns, whatever padding and the pool hold."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.calls.execute import Executor
from varlen_graphs.checks.values import quoted
from varlen_graphs.declaration.call import Call
from varlen_graphs.declaration.reading import read_layout
from varlen_graphs.errors import InputError, VerificationError, counted
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.graphs.graph_set import GraphSet
from varlen_graphs.options.verify import check_tolerance
from varlen_graphs.routing.packing import ReplayBatch
from varlen_graphs.shadows.shadow import Shadow
from varlen_graphs.torch_dispatch.checked_indices import run_checked
from varlen_graphs.verify.compare import Example, few
from varlen_graphs.verify.disagreement import Replays
from varlen_graphs.verify.error_locator import STATE
from varlen_graphs.verify.examples import with_other_rows

ReplayBatches = Sequence[ReplayBatch]


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


def verify_calls(executor: Executor, calls: Iterable[Mapping[str, Any]], tolerance: float | None) -> Verified:
    """Capture what calls need, and compare their replays with the module itself; see `GraphedEncoder.verify`."""
    check_tolerance(tolerance)
    if isinstance(calls, Mapping):
        raise InputError(f"verify came with one call, of {', '.join(map(repr, calls))}: expected a list of calls")
    if not isinstance(calls, Iterable):
        raise InputError(f"verify came with {quoted(calls)}: expected a list of calls")
    calls = [*calls]
    if odd := [type(call).__name__ for call in calls if not isinstance(call, Mapping)]:
        raise InputError(f"verify came with a {odd[0]} as a call: expected a dict of its arguments by name")
    if not calls:
        raise InputError("there are no calls to verify: expected at least one, as a dict of its arguments")
    store, spec = executor.store, executor.spec
    pairs = [(_bind(executor, one), _bind(executor, with_other_rows(one, spec))) for one in calls]
    for one, _ in pairs:  # first, because a memory limit may leave fewer budgets
        with executor.pool.exclusive(), executor.pool.order:
            if store.budgets.enabled:
                store.capture(store.inputs(one))
    pairs.sort(key=lambda pair: read_layout(spec, pair[0]).size)
    forward = executor.forward.on(Shadow(executor.forward.module))
    with torch.no_grad(), executor.pool.exclusive(), executor.pool.order:
        store.check_memory()
        replays = Replays(executor, forward, tolerance, pairs[-1][0].rows.device, strict=True)
        checked, against = set[Budget](), dict[str, None]()  # in the order of the calls
        ways_of = [_ways(executor, call) for call, _ in pairs]
        for (call, other), (graphs, ways) in zip(pairs, ways_of, strict=True):
            own, other_rows = _example(forward, call), _example(forward, other)
            largest = pairs[-1][1]
            filling = largest if largest.rows.shape[1:] == call.rows.shape[1:] else call
            _check_repeats(forward, own, replays, graphs, ways[0])
            for batches in ways:
                orders = [read_layout(spec, call).groups]
                for example, groups in ((own, orders), (other_rows, [])):
                    wrong = replays.disagreement(graphs, batches, example, groups, filling)()
                    if wrong is not None:
                        raise VerificationError(wrong)
                checked.update(batch.budget for batch in batches if batch.budget is not None)
            against |= dict.fromkeys([own.against, other_rows.against])
        store.check_memory()
    unchecked = store.budgets.costs.replays.keys() - checked
    budgets = tuple(sorted(checked)), tuple(sorted(unchecked))
    return Verified(len(pairs), *budgets, replays.error, replays.limit, tuple(against))


def _bind(executor: Executor, arguments: Mapping[str, Any]) -> Call:
    """Bind a call that graphs answer."""
    call, mode = executor.bind((), dict(arguments)), executor.mode
    mode.refresh()
    if reason := call.eager_reason or mode.eager_reason() or mode.why_no_graphs(call.rows.device):
        raise InputError(f"there is nothing to verify: calls run eager now ({reason})")
    read_layout(executor.spec, call)
    return call


def _ways(executor: Executor, call: Call) -> tuple[GraphSet, list[ReplayBatches]]:
    """Return the ways to replay a call: whole in every budget that holds it, and split if its route splits it.

    Raises:
        InputError: There is none.
    """
    spec, layout, costs = executor.spec, read_layout(executor.spec, call), executor.store.budgets.costs
    usage, size, everything = spec.usage.of(layout), spec.exact_budget(layout), range(len(layout))
    graphs = executor.store.find(call.key)
    whole = [budget for budget in sorted(costs.replays) if budget.holds(*usage)]
    whole += [size] * (graphs is not None and size in graphs.exact)
    batches = executor.router.route(call, costs, timed=False).batches
    ways = [batches] * (len(batches) > 1) + [[ReplayBatch(budget, everything)] for budget in whole]
    if not ways:
        raise InputError(f"no budget holds the items {few(layout)}: expected calls that fit one")
    if graphs is None:
        raise InputError("there is nothing to verify: no graph is left")
    if failed := [graphs.rejected[budget] for budget in whole if budget in graphs.rejected]:
        raise VerificationError(failed[0])
    return graphs, ways


def _example(forward: Forward, call: Call) -> Example:
    try:
        return Example(call, *run_checked(partial(forward.reference, call), call.rows.device))
    except Exception as error:
        error.add_note("varlen_graphs ran the module itself with a call to verify; pass calls that it accepts")
        raise


def _check_repeats(
    forward: Forward, example: Example, replays: Replays, graphs: GraphSet, batches: ReplayBatches
) -> None:
    """Check that the module returns the same for a call whenever it is asked."""
    state = dict([*forward.module.named_parameters(), *forward.module.named_buffers()])
    versions = {name: tensor._version for name, tensor in state.items() if not tensor.is_inference()}
    again = forward.reference(example.call).output
    changed = [name for name, version in versions.items() if state[name]._version != version]
    if changed:
        raise VerificationError(
            f"the module changes {', '.join(changed)} in place, so its output depends on earlier calls; call "
            "module.eval(), or compute in each call everything that depends on the call"
        )
    if example.differs_from(again, replays.replay(graphs, batches, example.call)) > replays.limit:
        raise VerificationError(STATE)
