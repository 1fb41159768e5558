"""The report of an encoder as a text table."""

from copy import copy
from typing import Any

from varlen_graphs.calls.gauges import bytes_now
from varlen_graphs.checks.values import quoted
from varlen_graphs.errors import counted
from varlen_graphs.graphs.store import GraphStore
from varlen_graphs.stats import Stats

FEW = 12
"""Number of budgets that are all listed, used or not."""


def report(name: str, store: GraphStore, stats: Stats, detail: bool) -> str:
    """Format the budgets, dropped ones that were replayed included, with their costs and counters.

    Args:
        name: Name of the encoder.
        store: Its graphs, and budgets with their costs.
        stats: Its counters.
        detail: If True, also budgets that no call used, if there are many, and what the numbers mean.
    """
    stats = copy(stats)  # of one moment
    budgets, kept, failure = store.budgets, store.kept_outside, store.failure
    costs, disabled, used = budgets.costs, dict(budgets.disabled), [*stats.replays]  # copied: other threads change them
    lines = [name]
    if failure is not None:
        lines += [f"nothing could be captured: {failure}"]
    if stats.capture_failures:
        lines += [
            f"captures in the background were ended by {counted(stats.capture_failures, 'error')}, the last: "
            f"{stats.capture_failure}"
        ]
    if took := store.took(2):
        lines += ["; ".join(took)]
    lines += ["", f"{'rows':>8}{'items':>8}{'segments':>10}{'ms':>10}{'replays':>9}"]
    left_out = [budget for budget in budgets.left_out if budget in disabled]
    listed = {*costs.replays, *disabled, *used}.difference(left_out)
    unused = listed - {*stats.uses, *disabled} if len(listed) > FEW and not detail else set()
    for budget in sorted(listed - unused):
        cost = f"{costs.replays[budget]:.3f}" if costs.measured and budget in costs.replays else "-"
        note = "" if budget in budgets.budgets else "  dropped"
        note = "  not used: a larger budget takes no longer" if budget in costs.dropped else note
        note = f"  disabled: {disabled[budget]}" if budget in disabled else note
        lines += [f"{budget.rows:>8}{budget.items:>8}{budget.segments:>10}{cost:>10}{stats.replays[budget]:>9}{note}"]
    if unused:
        lines += [f"{counted(len(unused), 'more budget')}, of {min(unused).rows} to {max(unused).rows} rows: not used"]
    if left_out:
        lines += [
            "",
            f"{len(left_out)} of {counted(len(budgets.defaults), 'default budget')}, of {left_out[0].rows} to "
            f"{left_out[-1].rows} rows, are left out; of {left_out[0].rows} rows {disabled[left_out[0]]}. Give budgets "
            "to have them",
        ]
    if costs.measured and detail:
        long = costs.per_square * 1024**2
        lines += [
            "",
            f"ms is the time of one replay without attention; attention adds {long:.3f} ms for each segment of 1024 "
            "rows, and four times as much for twice the rows",
            f"an eager call takes at least {costs.host:.2f} ms",
        ]
    if costs.bytes_per_row is not None and detail:
        lines += [f"pool and arena take {costs.bytes_per_row:,.0f} bytes per row of the largest budget"]
    lines += [
        "",
        f"{counted(stats.calls, 'call')} of {counted(stats.items, 'item')}; "
        f"{counted(stats.uses.total(), 'replay')} of {counted(stats.rows, 'active row')}, "
        f"{stats.padding_share:.1%} padding",
    ]
    if costs.measured and (replays := {b: n for b, n in stats.replays.items() if b in costs.replays}):
        own = sum(n * costs.replays[budget] for budget, n in replays.items())
        work = sum(n * costs.eager_work(stats.active[budget] // n, 0) for budget, n in replays.items())
        eager = max(work, costs.host * (stats.calls - stats.eager.total()))
        lines += [f"eager runs of the same calls would take some {eager / own:.1f} times as long, attention apart"]
    if (held := bytes_now(store)) is not None:
        lines += [f"{held / 2**20:,.0f} MiB of graphs, arena and pool"]
    exact = [size for graphs in store.sets for size in [*graphs.exact]]
    if exact or stats.exact:
        rows = ", ".join(str(size.rows) for size in sorted(exact)) or "none now"
        lines += [f"{counted(stats.exact.total(), 'replay')} of graphs of exactly the size of calls; rows: {rows}"]
    if len(store.sets) > 1:
        lines += ["graphs for these static arguments (adapters apart):"]
        lines += [f"  {_describe(graphs.inputs.static_args)}" for graphs in store.sets]
    for graphs in store.sets:
        lines += [f"verified against {against}" for against in sorted(graphs.against)]
        lines += [f"not verified on {left_out}" for left_out in sorted(graphs.unverified)]
        if graphs.kept:
            names = ", ".join(map(repr, graphs.kept))
            lines += [f"kept by runs of the module, which changes no output, and not by replays: {names}"]
        if waiting := [budget for budget in graphs.budgets if budget not in graphs.compared]:
            rows = ", ".join(str(budget.rows) for budget in sorted(waiting))
            which = f"these will be compared with the module itself; rows: {rows}"
            if len(waiting) > FEW and not detail:
                which = f"{len(waiting)} graphs will be compared with the module itself"
            lines += [f"the first call of each of {which}"]
        lines += [
            f"the graph of {budget.rows} rows is rejected: {why}" for budget, why in sorted(graphs.rejected.items())
        ]
    if stats.checked:
        checked = [f"{counted(n, 'replay')} verified against {against}" for against, n in stats.against.most_common()]
        lines += [f"{' and '.join(checked)}, {stats.wrong.total()} wrong"]
    for reason, count in stats.eager.most_common():
        last = f"; the last: {stats.details[reason]}" if reason in stats.details else ""
        lines += [f"{counted(count, 'eager run')}: {reason}{last}"]
    lines += [f"kept in the memory of graphs, which replays overwrite: {tensor}" for tensor in kept]
    return "\n".join(lines)


def _describe(static_args: dict[str, Any]) -> str:
    return ", ".join(f"{name}={quoted(value)}" for name, value in static_args.items()) or "the defaults"
