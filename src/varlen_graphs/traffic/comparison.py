"""Compare a plan with the usual ladders, as text."""

from collections.abc import Mapping

from varlen_graphs.budgets.ladder import Ladder
from varlen_graphs.errors import counted
from varlen_graphs.routing.costs import REPLAY_ROWS, Costs
from varlen_graphs.traffic.planning import Plan, evaluate
from varlen_graphs.traffic.trace import Trace

BAR = 40
"""Length of the longest bar, in characters."""


def compare(trace: Trace, plan: Plan, costs: Costs) -> dict[str, Plan]:
    """Return the plan, the default ladder and a ladder of powers of two, by name, with room for the same items."""
    smallest, largest = (pick(size.rows for size in trace.calls) for pick in (min, max))
    powers = [2**exponent for exponent in range((smallest - 1).bit_length(), (largest - 1).bit_length() + 1)]
    ladders = {"Ladder()": [*Ladder().row_counts()], "powers of two": powers}
    return {"plan": plan} | {name: evaluate(trace, rows, costs) for name, rows in ladders.items()}


def table(trace: Trace, plans: Mapping[str, Plan]) -> str:
    """Format padding, expected cost and memory of each plan, one plan per line."""
    items, rows = (sum(size[at] * count for size, count in trace.calls.items()) / len(trace) for at in (1, 0))
    measured = any(plan.measured for plan in plans.values())
    unit, digits = ("ms", 3) if measured else ("cost", 0)
    lines = [
        f"{counted(len(trace), 'call')} of {items:.1f} items and {rows:.0f} rows on average",
        "",
        f"{'':<16}{'graphs':>8}{'used':>8}{'padding':>10}{unit + ' per call':>15}{'GiB':>8}{'eager':>8}",
    ]
    for name, plan in plans.items():
        memory = "-" if plan.memory is None else f"{plan.memory / 2**30:.2f}"
        lines += [
            f"{name:<16}{len(plan.budgets):>8}{len(plan.replays):>8}{plan.padding_share:>10.1%}"
            f"{plan.cost_per_call:>15,.{digits}f}{memory:>8}{plan.eager:>8}"
        ]
    attention = max(plan.attention / plan.calls for plan in plans.values())
    note = f"ms of replays without attention, which takes {attention:.3f} ms per call with any budgets"
    lines += ["", note if measured else f"cost in rows plus {REPLAY_ROWS} per replay: no time was measured"]
    if any(plan.eager for plan in plans.values()):
        lines += ["calls that no budget holds run eager: only the last column counts them"]
    return "\n".join(lines)


def bars(plan: Plan) -> str:
    """Format the budgets of a plan, one per line, each with a bar of its replayed rows: active ones and padding."""
    longest = max(budget.rows * count for budget, count in plan.replays.items())
    lines = [f"{'rows':>8}{'items':>8}{'segments':>10}{'replays':>9}{'padding':>9}  # active rows, . padding"]
    for budget in plan:
        replayed = budget.rows * plan.replays[budget]
        padding = replayed - plan.active[budget]
        bar = "#" * round(BAR * plan.active[budget] / longest)
        lines += [
            f"{budget.rows:>8}{budget.items:>8}{budget.segments:>10}{plan.replays[budget]:>9}"
            f"{padding / replayed:>9.1%}  {bar.ljust(round(BAR * replayed / longest), '.')}"
        ]
    return "\n".join(lines)
