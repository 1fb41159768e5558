"""`routing.packing`: which items of a call share a replay."""

import time
from functools import reduce

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support import strategies
from varlen_graphs.layouts.usage import Usage
from varlen_graphs.routing.costs import Costs
from varlen_graphs.routing.packing import EXACT_ITEMS, ReplayBatch, cheapest, pack, total_cost


@given(st.lists(strategies.usages, min_size=1, max_size=20), strategies.costs(5))
def test_every_item_is_packed_once_within_every_capacity(usages, costs):
    batches = pack(usages, costs)
    assert sorted(i for one in batches for i in one.items) == list(range(len(usages)))
    for one in batches:
        assert list(one.items) == sorted(one.items)
        mine = [usages[i] for i in one.items]
        if one.budget is None:
            assert len(mine) == 1
            assert cheapest(Usage().add(*mine), costs) is None
        else:
            assert sum(d.rows for d in mine) <= one.budget.rows
            assert sum(d.items for d in mine) <= one.budget.items
            assert sum(d.segments for d in mine) <= one.budget.segments
            assert max(d.longest for d in mine) <= one.budget.max_seqlen


def waived(usages, costs):
    """What a split may save without being made."""
    whole = cheapest(reduce(Usage.add, usages, Usage()), costs)
    return costs.least_saved(len(usages), whole) if whole else 0.0


@given(st.lists(strategies.usages, min_size=1, max_size=100), strategies.costs(5))
def test_packing_never_costs_more_than_one_item_a_replay(usages, costs):
    alone = [cheapest(Usage().add(d), costs) for d in usages]
    most = sum(costs.replays[b] for b in alone if b) + waived(usages, costs)
    assert total_cost(pack(usages, costs), costs) <= most + 1e-9


@given(strategies.usages, st.integers(1, 8), strategies.costs(6))
def test_one_replay_is_in_the_cheapest_budget_that_holds_it(usage, items, costs):
    usage = Usage(usage.rows, items, usage.segments, usage.longest)
    holding = [costs.replays[budget] for budget in costs.replays if budget.holds(*usage)]
    chosen = cheapest(usage, costs)
    assert (costs.replays[chosen] if chosen else None) == min(holding, default=None)


def partitions(items):
    if not items:
        yield []
        return
    first, *rest = items
    for partition in partitions(rest):
        yield [[first], *partition]
        for at in range(len(partition)):
            yield [*partition[:at], [first, *partition[at]], *partition[at + 1 :]]


@settings(max_examples=30)
@given(st.lists(strategies.usages, min_size=1, max_size=5), strategies.costs(4))
def test_small_calls_are_packed_at_the_least_cost(usages, costs):
    fitting = [d for d in usages if cheapest(Usage().add(d), costs)]
    totals = []
    for partition in partitions(fitting):
        chosen = [cheapest(reduce(Usage.add, group, Usage()), costs) for group in partition]
        if all(chosen):
            totals.append(sum(costs.replays[budget] for budget in chosen))
    assert len(usages) <= EXACT_ITEMS
    assert min(totals) - 1e-9 <= total_cost(pack(usages, costs), costs) <= min(totals) + waived(usages, costs) + 1e-9


def test_nothing_is_looked_for_that_could_not_repay_the_search():
    usages = [Usage(400, 1, 1, 400)] * 30
    budgets = {vg.budgets.Budget(rows): 1 + rows * 0.002 for rows in (6_000, 16_000)}
    (one,) = pack(usages, Costs(budgets | {vg.budgets.Budget(12_800): 28.0}, host=9.0))  # two of 6,000 would take 26
    assert one.budget.rows == 12_800
    assert len(pack(usages, Costs(budgets, host=9.0))) == 2  # one of 16,000 takes 33


def test_a_split_that_saves_less_than_times_vary_by_is_not_made():
    usages = [Usage(1000, 1, 1, 1000)] * 2
    small, large = vg.budgets.Budget(1000), vg.budgets.Budget(2000)
    assert len(pack(usages, Costs({small: 4.6, large: 10.0}, host=9.0))) == 1
    assert len(pack(usages, Costs({small: 4.4, large: 10.0}, host=9.0))) == 2


def test_a_video_counts_its_frames():
    budgets = [vg.budgets.Budget(1024, items=8, segments=8), vg.budgets.Budget(2048, items=8, segments=64)]
    (one,) = pack([Usage(rows=400, items=1, segments=10, longest=40)], Costs.in_rows(budgets))
    assert one.budget.segments == 64


def test_two_small_replays_beat_one_that_is_much_larger():
    batches = pack([Usage(1000, 1, 1, 1000)] * 2, Costs.in_rows([vg.budgets.Budget(1024), vg.budgets.Budget(4096)]))
    assert [one.items for one in batches] == [(0,), (1,)]
    (one,) = pack([Usage(100, 1, 1, 100)] * 2, Costs.in_rows([vg.budgets.Budget(128), vg.budgets.Budget(256)]))
    assert one.budget.rows == 256


def test_many_items_are_packed_well_by_the_heuristic():
    sizes = [700, 300, 650, 350, 600, 400, 550, 450, 500, 500]
    batches = pack([Usage(rows, 1, 1, rows) for rows in sizes], Costs.in_rows([vg.budgets.Budget(1000, items=8)]))
    assert len(batches) <= 6


@given(st.data())
def test_slices_cover_the_items_of_a_replay_batch_in_order(data):
    items = data.draw(strategies.grids(max_items=8))
    layout = vg.layouts.Layout(tuple(items))
    chosen = sorted(data.draw(st.sets(st.integers(0, len(items) - 1), min_size=1)))
    rows_there, rows_here = [], []
    starts = [sum(layout.rows[:i]) for i in range(len(items))]
    expected = [row for i in chosen for row in range(starts[i], starts[i] + layout.rows[i])]
    for there, here in ReplayBatch(None, tuple(chosen)).slices(layout):
        assert there.rows == here.rows
        assert there.items == here.items
        rows_there += range(there.row, there.row + there.rows)
        rows_here += range(here.row, here.row + here.rows)
    assert rows_there == expected
    assert rows_here == list(range(len(expected)))


def test_hundreds_of_items_are_packed_closely():
    sizes = [60 + 37 * i % 240 for i in range(500)]
    costs = Costs.in_rows([vg.budgets.Budget(2048), vg.budgets.Budget(4096, items=64)])
    batches = pack([Usage(rows, 1, 1, rows) for rows in sizes], costs)
    assert sorted(i for one in batches for i in one.items) == list(range(500))
    assert total_cost(batches, costs) < 1.25 * (sum(sizes) + 512 * sum(sizes) / 4096)


@pytest.mark.parametrize("items", [7, 32, 100])
def test_many_items_fill_large_replays_by_measured_times(items):
    budgets = [vg.budgets.Budget(rows, items=256) for rows in (64, 256, 1024, 4096, 16384)]
    costs = Costs({budget: 0.1 + 0.00015 * budget.rows for budget in budgets}, host=1.0)
    usages = [Usage(300, 1, 1, 300)] * items
    batches = pack(usages, costs)
    assert len(batches) <= 3
    alone = [ReplayBatch(cheapest(one, costs), (at,)) for at, one in enumerate(usages)]
    assert total_cost(batches, costs) < 0.7 * total_cost(alone, costs)


def test_the_time_to_pack_grows_with_the_items_and_not_with_their_square():
    start = time.monotonic()
    assert len(pack([Usage(1, 1, 1, 1)] * 20_000, Costs.in_rows([vg.budgets.Budget(64, items=8)]))) == 2500
    assert time.monotonic() - start < 20  # a minute and more, if every pack stayed open


@pytest.mark.parametrize("count", [1, 3, 9, 40])
def test_a_call_that_fits_one_budget_closely_is_one_replay(count):
    usages = [Usage(100, 1, 1, 100)] * count
    (one,) = pack(usages, Costs.in_rows([vg.budgets.Budget(n, items=64, segments=64) for n in range(128, 4200, 128)]))
    assert list(one.items) == list(range(count))
