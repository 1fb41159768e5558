"""Verification of calls that the user gives."""

from collections.abc import Iterable, Mapping
from typing import Any

from varlen_graphs.errors import InputError
from varlen_graphs.layout.values import quoted
from varlen_graphs.serving.execute import Executor
from varlen_graphs.spec.call import Call
from varlen_graphs.spec.reading import read_layout
from varlen_graphs.verify.examples import with_other_rows
from varlen_graphs.verify.options import check_tolerance
from varlen_graphs.verify.verifier import Verified, Verifier


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
    pairs = [(_bind(executor, one), _bind(executor, with_other_rows(one, executor.spec))) for one in calls]
    store = executor.store
    for one, _ in pairs:  # first, because a memory limit may leave fewer budgets
        with executor.pool.exclusive(), executor.pool.order:
            if store.budgets.enabled:
                store.capture(store.inputs(one))
    return Verifier(executor, tolerance, pairs).verify()


def _bind(executor: Executor, arguments: Mapping[str, Any]) -> Call:
    """Bind a call that graphs answer."""
    call, mode = executor.bind((), dict(arguments)), executor.mode
    mode.refresh()
    if reason := call.beyond or mode.eager_reason() or mode.why_no_graphs(call.rows.device):
        raise InputError(f"there is nothing to verify: calls run eager now ({reason})")
    read_layout(executor.spec, call)
    return call
