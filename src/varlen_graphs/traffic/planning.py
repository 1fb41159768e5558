"""Which budgets suit a trace."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from varlen_graphs.errors import BudgetError, InputError
from varlen_graphs.layout.budgets import ROW_ALIGNMENT, Budget, row_count_for
from varlen_graphs.layout.memory_size import most_rows
from varlen_graphs.layout.needs import Load
from varlen_graphs.routing.costs import Costs
from varlen_graphs.traffic.trace import Size, Trace

ASSUMED = Costs.in_rows([Budget(ROW_ALIGNMENT)])
"""What replays cost where nothing was measured."""

ROUNDING = 1e-9
"""Budgets that gain less than this share of the cost gain nothing."""


@dataclass(frozen=True)
class Plan:
    """Budgets, and what the calls of a trace cost with them. It is taken wherever budgets are.

    A call is one replay of the smallest budget that holds it. One that has too many rows for all is taken as parts that
    fit if all of its items but the largest are of one size, and as eager if the largest fits none.

    Attributes:
        budgets: The budgets, ascending, each with room for all calls of no more rows.
        calls: Calls of the trace.
        replays: Replays of each budget.
        active: Active rows in all replays of each budget.
        eager: Calls of which an item, or a group, has too many rows for all budgets. They are in no other number.
        cost: What all replays cost, attention aside: milliseconds if they were measured, rows and 512 a replay else.
        attention: Milliseconds that attention takes in all calls, whatever the budgets.
        measured: Whether costs were measured.
        memory: Bytes of pool and arena; `None` where what a row takes was not measured.
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
        """Rows of padding of all replays."""
        return sum(budget.rows * count for budget, count in self.replays.items()) - self.rows

    @property
    def padding_share(self) -> float:
        """Padding among all replayed rows, 0 to 1."""
        return self.padding / max(1, self.rows + self.padding)

    @property
    def cost_per_call(self) -> float:
        """The mean cost of the calls that are replayed: those that run eager are not in `cost`."""
        return self.cost / max(1, self.calls - self.eager)


def plan(
    trace: Trace, *, max_graphs: int = 32, max_memory: int | str | None = None, costs: Costs | None = None
) -> Plan:
    """Choose the budgets that calls like those of a trace take the least time with.

    Row counts are chosen among those that a `Ladder` takes (multiples of 32, then of 128, then 16 less), for each call
    the fewest that hold it. A budget of so many rows gets room for the items and segments of every call of no more
    rows, so that budgets nest, and calls go to the smallest by rows. Of all such budgets these cost the least: exactly,
    by dynamic programming. Where a replay costs what its rows say, and no less than one of fewer rows, room for items
    and segments is free, and no other budgets of these row counts cost less either. Splits that the packer may make of
    a call that some budget holds are not foreseen; it makes them only where they cost less.

    There is no budget without calls, and there are fewer than `max_graphs` where more would gain nothing. Later calls
    may be larger than those of the trace: add budgets for them, `[*vg.traffic.plan(trace), vg.Budget(16_384)]`.

    Args:
        trace: The calls.
        max_graphs: The most budgets.
        max_memory: What pool and arena may take: bytes, or a text such as `"2GiB"`. It bounds the rows of the largest
            budget, because graphs share that one's memory.
        costs: What replays cost, in place of what is in the trace: `encoder.costs`, or `Trace.load(...).costs`. Between
            the budgets that were measured, costs are interpolated.

    Raises:
        InputError: There are no calls in the trace, or these are no trace and costs.
        BudgetError: No graph is allowed, or no call fits the memory, or it is not known what a row takes.
    """
    if not isinstance(trace, Trace) or not isinstance(costs, Costs | None):
        came = f"a {type(trace).__name__} and costs of {type(costs).__name__}"
        raise InputError(f"plan() came with {came}: expected a Trace, such as Trace.load(path), and Costs or None")
    trace = trace.copy()
    # Of an encoder that has no budget in use there are none.
    costs = next((one for one in (costs, trace.costs) if one is not None and one.replays), ASSUMED)
    if not trace.calls:
        raise InputError("there are no calls in the trace: expected some inside `with encoder.record() as trace`")
    if max_graphs < 1:
        raise BudgetError(f"max_graphs={max_graphs}: expected at least 1")
    largest = row_count_for(max(size.rows for size in trace.calls))
    if max_memory is not None:
        if costs.bytes_per_row is None:
            raise BudgetError(
                f"max_memory={max_memory!r}, but what a row takes was not measured: record where graphs are captured, "
                "on a GPU, or pass the costs of such an encoder, costs=encoder.costs"
            )
        largest = min(largest, most_rows(max_memory, costs.bytes_per_row, ROW_ALIGNMENT))
    replays: Counter[int] = Counter()
    for size, calls in trace.calls.items():
        for part, count in _parts(size, largest):
            replays[min(row_count_for(part.rows), largest)] += calls * count
    if not replays:
        raise BudgetError(f"no call fits the {largest} rows that max_memory={max_memory!r} has room for: allow more")
    return evaluate(trace, _cheapest(replays, costs.replay, max_graphs), costs)


def evaluate(trace: Trace, row_counts: Sequence[int], costs: Costs) -> Plan:
    """What the calls of a trace cost with budgets of these row counts, ascending, that nest as those of `plan` do."""
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


def _parts(size: Size, most: int) -> list[tuple[Load, int]]:
    """What replays of at most so many rows must hold for a call, and how many of each; none if an item has more rows.

    A trace knows the largest item, and how many rows the others have together. These are taken to be of one size: as
    many as fit go with the largest, the others fill further replays. Which of them meet is not known, so each replay
    has room for the items and segments of the whole call.
    """
    if size.largest > most:
        return []
    if size.rows <= most:
        return [(Load(*size[:4]), 1)]
    others, rows = size.items - 1, size.rows - size.largest
    beside, fitting = ((most - taken) * others // rows for taken in (size.largest, 0))
    full, rest = divmod(others - beside, fitting)
    replays = ((size.largest, beside, 1), (0, fitting, full), (0, rest, min(rest, 1)))
    return [
        (Load(more + math.ceil(items * rows / others), *size[1:4]), count) for more, items, count in replays if count
    ]


def _budget(rows: int, parts: Sequence[Load]) -> Budget:
    """The budget of so many rows with room for the items and segments of everything that has no more rows."""
    held = [part for part in parts if part.rows <= rows]
    items = max((part.items for part in held), default=1)
    return Budget(rows, items, max([items, *(part.segments for part in held)]))


def _cheapest(replays: Mapping[int, int], price: Callable[[int], float], most: int) -> list[int]:
    """The row counts, at most so many and no more than pay, with which all replays cost the least.

    Args:
        replays: How many replays there are for which each row count is the smallest.
        price: What a replay of a budget of so many rows costs.
        most: How many row counts may be chosen.
    """
    rows = sorted(replays)
    before = [*accumulate((replays[count] for count in rows), initial=0)]
    prices = [price(count) for count in rows]
    best = [0.0] + [math.inf] * len(rows)  # of the first row counts, with as many budgets as there are layers
    layers: list[list[int]] = []  # how many of the first row counts the budgets below the last one are for
    totals = []
    for _ in range(min(most, len(rows))):
        after, starts = [math.inf], [0]
        for end, each in enumerate(prices, start=1):
            choices = [cost + (before[end] - below) * each for cost, below in zip(best[:end], before, strict=False)]
            after.append(min(choices))
            starts.append(choices.index(after[end]))
        best = after
        layers.append(starts)
        totals.append(best[-1])
    fewest = next(at for at, total in enumerate(totals) if total <= min(totals) * (1 + ROUNDING))
    chosen, end = [], len(rows)
    for layer in reversed(layers[: fewest + 1]):
        chosen.append(rows[end - 1])
        end = layer[end]
    return chosen[::-1]
