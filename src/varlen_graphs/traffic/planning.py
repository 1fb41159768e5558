"""Plan the budgets that suit a trace."""

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from varlen_graphs.budgets.budget import ROW_ALIGNMENT, Budget
from varlen_graphs.budgets.ladder import row_count_for
from varlen_graphs.budgets.memory_size import in_bytes, most_rows
from varlen_graphs.checks.fields import is_integer
from varlen_graphs.checks.values import quoted
from varlen_graphs.errors import BudgetError, InputError, counted
from varlen_graphs.layouts.usage import Usage
from varlen_graphs.routing.costs import Costs
from varlen_graphs.traffic.trace import Size, Trace

ASSUMED = Costs.in_rows([Budget(ROW_ALIGNMENT)])
"""Costs of replays if nothing was measured."""

ROUNDING = 1e-9
"""Relative reduction of the cost below which another budget is not worth a graph."""


@dataclass(frozen=True)
class Plan:
    """Budgets, and the costs of the calls of a trace with them. Accepted wherever budgets are.

    Each call counts as one replay of the smallest budget that holds it. A call with more rows than the largest budget
    counts as several replays, under the assumption that all of its items but the largest have the same size; if its
    largest item fits no budget, it counts as eager.

    Attributes:
        budgets: Budgets, ascending, each with room for all calls with at most its rows.
        calls: Number of calls of the trace.
        replays: Number of replays of each budget.
        active: Active rows in all replays of each budget.
        eager: Number of calls with an item, or a group, that has too many rows for every budget. No other number
            includes them, except `calls`.
        cost: Cost of all replays without attention: milliseconds if measured, otherwise rows plus 512 per replay.
        attention: Milliseconds of attention in all calls, the same with any budgets.
        measured: True if costs were measured.
        memory: Bytes of pool and arena; `None` if the bytes per row were not measured.
    """

    budgets: tuple[Budget, ...]
    calls: int
    replays: Counter[Budget]
    active: Counter[Budget]
    eager: int
    cost: float
    attention: float
    measured: bool
    memory: float | None

    def __iter__(self) -> Iterator[Budget]:
        return iter(self.budgets)

    @property
    def rows(self) -> int:
        """Active rows of all replays."""
        return self.active.total()

    @property
    def padding(self) -> int:
        """Padding rows of all replays."""
        return sum(budget.rows * count for budget, count in self.replays.items()) - self.rows

    @property
    def padding_share(self) -> float:
        """Share of padding in all replayed rows, 0 to 1."""
        return self.padding / max(1, self.rows + self.padding)

    @property
    def cost_per_call(self) -> float:
        """Mean cost of the calls that are replayed, eager ones excluded."""
        return self.cost / max(1, self.calls - self.eager)


def plan(
    trace: Trace, *, max_graphs: int = 32, max_memory: int | str | None = None, costs: Costs | None = None
) -> Plan:
    """Choose the budgets with which calls like those of a trace take the least time.

    The candidates are the row counts of a `Ladder` (multiples of 32, then of 128, then 16 less): for each call, the
    smallest that holds it. A budget has room for the items and segments of every call with at most its rows. So budgets
    nest, and each call uses the smallest budget by rows. Dynamic programming finds the cheapest of all such budgets,
    exactly. As long as the cost of a replay depends on its rows alone and does not fall with more rows, room for items
    and segments is free, and no other budgets of these row counts cost less either. The plan does not foresee that the
    packer may split a call that a budget holds; the packer does so only if it costs less.

    Every budget has calls, and there are fewer than `max_graphs` if more would gain nothing. Later calls may be larger
    than those of the trace: add budgets for them, `[*vg.traffic.plan(trace), vg.budgets.Budget(16_384)]`.

    Args:
        trace: The recorded calls.
        max_graphs: Largest number of budgets.
        max_memory: Limit for pool and arena: bytes, or a text such as `"2GiB"`. It limits the rows of the largest
            budget, whose memory all graphs share.
        costs: Costs of replays to use instead of those in the trace: `encoder.costs`, or `Trace.load(...).costs`.
            Costs between measured budgets are interpolated.

    Returns:
        The budgets, and their costs for the trace.

    Raises:
        InputError: The trace has no calls, or an argument is not a `Trace` or not `Costs`.
        BudgetError: `max_graphs` is below 1, no call fits `max_memory`, or the bytes per row were not measured.
    """
    if not isinstance(trace, Trace) or not isinstance(costs, Costs | None):
        got = f"a {type(trace).__name__} and costs of {type(costs).__name__}"
        raise InputError(f"plan() got {got}: expected a Trace, such as Trace.load(path), and Costs or None")
    if not is_integer(max_graphs) or max_graphs < 1:
        raise BudgetError(f"max_graphs={quoted(max_graphs)}: expected an integer of at least 1")
    trace = trace.copy()
    # Costs of an encoder without enabled budgets have no replays.
    costs = next((one for one in (costs, trace.costs) if one is not None and one.replays), ASSUMED)
    if not trace.calls:
        raise InputError("the trace has no calls: expected calls inside `with encoder.record() as trace`")
    largest = row_count_for(max(size.rows for size in trace.calls))
    if max_memory is not None:
        in_bytes(max_memory)  # an amount that is none is the first thing to say
        if costs.bytes_per_row is None:
            raise BudgetError(
                f"max_memory={max_memory!r}, but the bytes per row were not measured: record with an encoder that "
                "captures on a GPU, or pass the costs of one, costs=encoder.costs"
            )
        largest = min(largest, most_rows(max_memory, costs.bytes_per_row, ROW_ALIGNMENT))
    replays: Counter[int] = Counter()
    for size, calls in trace.calls.items():
        for part, count in _parts(size, largest):
            replays[min(row_count_for(part.rows), largest)] += calls * count
    if not replays:
        raise BudgetError(
            f"no call fits the {counted(largest, 'row')} that max_memory={max_memory!r} has room for: raise it"
        )
    return evaluate(trace, _cheapest(replays, costs.replay, max_graphs), costs)


def evaluate(trace: Trace, row_counts: Sequence[int], costs: Costs) -> Plan:
    """Return the plan with these row counts, ascending; budgets nest as those of `plan` do."""
    parts = {size: _parts(size, row_counts[-1]) for size in trace.calls}
    budgets = [_budget(rows, [part for of_call in parts.values() for part, _ in of_call]) for rows in row_counts]
    replays: Counter[Budget] = Counter()
    active: Counter[Budget] = Counter()
    eager = 0
    for size, calls in trace.calls.items():
        eager += 0 if parts[size] else calls
        for part, count in parts[size]:
            budget = budgets[bisect_left(row_counts, part.rows)]
            replays[budget] += calls * count
            active[budget] += calls * count * part.rows
    return Plan(
        tuple(budgets),
        len(trace),
        replays,
        active,
        eager,
        cost=sum(costs.replay(budget.rows) * count for budget, count in replays.items()),
        attention=costs.per_square * trace.squares,
        measured=costs.measured,
        memory=None if costs.bytes_per_row is None else costs.bytes_per_row * row_counts[-1],
    )


def _parts(size: Size, most: int) -> list[tuple[Usage, int]]:
    """Return the usage of the replays of a call, of at most `most` rows each, and their counts; none if eager."""
    # A trace has only the largest item and the total rows of the others, which are assumed to have equal sizes: as many
    # as fit join the largest, and the others fill further replays. It is not known which items share a replay, so each
    # has room for the items and segments of the whole call.
    if size.largest > most:
        return []
    if size.rows <= most:
        return [(Usage(*size[:4]), 1)]
    others, rows = size.items - 1, size.rows - size.largest
    beside, fitting = ((most - taken) * others // rows for taken in (size.largest, 0))
    full, rest = divmod(others - beside, fitting)
    replays = ((size.largest, beside, 1), (0, fitting, full), (0, rest, min(rest, 1)))
    return [
        (Usage(more + math.ceil(items * rows / others), *size[1:4]), count) for more, items, count in replays if count
    ]


def _budget(rows: int, parts: Sequence[Usage]) -> Budget:
    """Return the budget with room for the items and segments of every part with at most its rows."""
    held = [part for part in parts if part.rows <= rows]
    items = max((part.items for part in held), default=1)
    return Budget(rows, items, max([items, *(part.segments for part in held)]))


def _cheapest(replays: Mapping[int, int], price: Callable[[int], float], most: int) -> list[int]:
    """Choose the cheapest row counts, at most `most`; `replays` counts by the smallest row count that holds them."""
    rows, counts, prices = _worth_paying(replays, price)
    before = [*accumulate(counts, initial=0)]
    best = [0.0] + [math.inf] * len(rows)  # cost of the first n row counts with one budget per layer
    layers: list[list[int]] = []  # for each n, how many row counts the budgets below the last one serve
    totals = []
    for _ in range(min(most, len(rows))):
        best, starts = _with_one_more(best, before, prices)
        layers.append(starts)
        totals.append(best[-1])
    fewest = next(at for at, total in enumerate(totals) if total <= min(totals) * (1 + ROUNDING))
    chosen, end = [], len(rows)
    for layer in reversed(layers[: fewest + 1]):
        chosen.append(rows[end - 1])
        end = layer[end]
    return chosen[::-1]


def _worth_paying(
    replays: Mapping[int, int], price: Callable[[int], float]
) -> tuple[list[int], list[int], list[float]]:
    """Return the row counts that cost less than all larger ones, ascending; their replays and those below; the prices.

    A budget of another row count is never used: a larger one costs no more.
    """
    rows: list[int] = []
    counts: list[int] = []
    prices: list[float] = []
    for count in sorted(replays, reverse=True):
        each = price(count)
        if rows and each >= prices[-1]:
            counts[-1] += replays[count]
        else:
            rows.append(count)
            counts.append(replays[count])
            prices.append(each)
    return rows[::-1], counts[::-1], prices[::-1]


def _with_one_more(
    best: Sequence[float], before: Sequence[int], prices: Sequence[float]
) -> tuple[list[float], list[int]]:
    """Return the least cost of the first n row counts with one budget more, for each n, and how many others serve.

    What the first `s` cost with the others, `best[s] - before[s] * price` apart from what is the same for all `s`, is a
    line over the price, and falls faster than those of smaller `s`. Prices ascend, so the lowest line at each comes
    after that at the one before, among those that are the lowest somewhere.
    """
    after, starts = [math.inf], [0]
    lines: deque[int] = deque()
    for end, each in enumerate(prices, start=1):

        def cost(start: int, end: int = end, each: float = each) -> float:
            return best[start] + (before[end] - before[start]) * each

        new = end - 1
        if best[new] < math.inf:
            while len(lines) > 1 and _is_nowhere_lowest(lines[-2], lines[-1], new, best, before):
                lines.pop()
            lines.append(new)
        while len(lines) > 1 and cost(lines[1]) < cost(lines[0]):
            lines.popleft()
        starts.append(lines[0] if lines else 0)
        after.append(cost(starts[-1]) if lines else math.inf)
    return after, starts


def _is_nowhere_lowest(left: int, middle: int, right: int, best: Sequence[float], before: Sequence[int]) -> bool:
    """Return True if one of two other lines is no higher than the middle one, wherever it is lower than the other."""
    rise, further = best[middle] - best[left], best[right] - best[middle]
    return further * (before[middle] - before[left]) <= rise * (before[right] - before[middle])
