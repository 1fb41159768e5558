"""`routing.Costs`: which budgets are worth using, what a split costs at least, and when graphs are slower than none."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support import strategies
from tests.support.encoders import attention_encoder
from varlen_graphs.declaration.call import Call
from varlen_graphs.routing.costs import Costs
from varlen_graphs.routing.enabled import EnabledBudgets
from varlen_graphs.routing.router import Router


@given(strategies.costs(6))
def test_a_budget_is_dropped_only_for_one_that_holds_as_much_and_costs_no_more(costs):
    assert sorted([*costs.budgets, *costs.dropped]) == sorted(costs.replays)
    for dropped in costs.dropped:
        assert any(
            kept.holds(dropped.rows, dropped.items, dropped.segments, dropped.max_seqlen)
            and costs.replays[kept] <= costs.replays[dropped]
            for kept in costs.budgets
        )


@given(strategies.costs(6), st.data())
def test_no_split_costs_less_than_the_bound(costs, data):
    chosen = data.draw(st.lists(st.sampled_from(costs.budgets), min_size=1, max_size=5))
    rows = data.draw(st.integers(1, sum(budget.rows for budget in chosen)))
    assert costs.lower_bound(rows, len(chosen)) <= sum(costs.replays[budget] for budget in chosen) + 1e-9


@given(strategies.costs(6), st.data())
def test_no_split_is_ruled_out_that_saves_enough(costs, data):
    chosen = data.draw(st.lists(st.sampled_from(costs.budgets), min_size=2, max_size=5))
    rows = data.draw(st.integers(1, sum(budget.rows for budget in chosen)))
    whole = data.draw(st.sampled_from(costs.budgets))
    saved = costs.replays[whole] - sum(costs.replays[budget] for budget in chosen)
    if saved > costs.least_saved(len(chosen), whole) + 1e-9:
        assert costs.may_split(rows, len(chosen), whole)


def test_the_bound_is_close_also_where_small_budgets_cost_the_same():
    costs = Costs({vg.budgets.Budget(rows): 1 + max(rows, 640) / 100 for rows in range(128, 4097, 128)})
    assert costs.lower_bound(4000, 2) == pytest.approx(2 + 4000 / 100)


def test_a_budget_for_few_items_says_nothing_of_calls_with_many():
    """Both have as many rows, but only the costly one holds the call: nothing of it is padding."""
    few, many = vg.budgets.Budget(4096, items=4, segments=512), vg.budgets.Budget(4096, items=512)
    costs = Costs({few: 10.0, many: 20.0}, host=1.0, eager_factor=1.1)
    layout = vg.layouts.Layout(((1, 1, 8),) * 512)
    assert [pack.budget for pack in routed(layout, costs).batches] == [many]


@given(strategies.costs(6), st.integers(1, 2000))
def test_an_exact_graph_costs_between_the_budgets_around_it(costs, rows):
    smaller = [b for b in costs.budgets if b.rows <= rows]
    larger = [b for b in costs.budgets if b.rows >= rows]
    next_rows = {b.rows for b in [*smaller[-1:], *larger[:1]]}
    around = [costs.replays[b] for b in costs.budgets if b.rows in next_rows]
    if not larger:
        assert costs.exact(rows) > 0
    elif not smaller:
        assert 0 < costs.exact(rows) <= max(around)
    elif len({b.rows for b in costs.budgets}) == len(costs.budgets):
        assert min(around) - 1e-9 <= costs.exact(rows) <= max(around) + 1e-9


def test_a_replay_costs_what_was_measured_around_it():
    costs = Costs({vg.budgets.Budget(rows): 1 + rows / 100 for rows in (256, 512, 1024)}, host=5.0)
    assert costs.replay(512) == costs.replays[vg.budgets.Budget(512)]
    assert costs.replay(640) == pytest.approx(7.4)
    assert costs.replay(16) == costs.replay(256) == costs.replays[vg.budgets.Budget(256)]
    assert costs.replay(4096) == pytest.approx(41.96)
    assert Costs({vg.budgets.Budget(512): 4.0}, host=5.0).replay(1024) == pytest.approx(8)
    assert Costs.in_rows([vg.budgets.Budget(512)]).replay(64) == 64 + 512


@given(strategies.costs(6), st.lists(strategies.budgets, min_size=1, max_size=6, unique=True))
def test_what_was_not_timed_costs_what_lies_between(costs, budgets):
    over = costs.over(budgets)
    assert over.measured == costs.measured
    assert over.replays.keys() == {*budgets}
    for budget, cost in over.replays.items():
        if budget in costs.replays and costs.measured:
            assert cost == costs.replays[budget]
        elif costs.measured:
            rows = [one.rows for one in costs.replays]
            around = [
                max([one for one in rows if one <= budget.rows], default=None),
                min([one for one in rows if one >= budget.rows], default=None),
            ]
            if None not in around:
                of = [c for b, c in costs.replays.items() if b.rows in around]
                assert min(of) - 1e-9 <= cost <= max(of) + 1e-9
    assert over.over(budgets) is over


def test_a_smaller_budget_that_was_not_timed_is_worth_wanting():
    """Were it taken to cost what the smallest one does, no call would want it."""
    costs = Costs({vg.budgets.Budget(1024): 4.0}, host=5.0).over(
        [vg.budgets.Budget(256), vg.budgets.Budget(1024), vg.budgets.Budget(4096)]
    )
    assert costs.replays[vg.budgets.Budget(256)] == pytest.approx(4.0 * (256 + 512) / (1024 + 512))
    assert costs.replays[vg.budgets.Budget(4096)] == pytest.approx(4.0 * (4096 + 512) / (1024 + 512))
    assert not costs.dropped


def routed(layout, costs, budgets=None):
    """The route of a call of these items, with the budgets and costs as measured for calls like it."""
    spec = vg.BufferSpec(
        "x", vg.GridTHW(), buffers=[vg.buffers.CuSeqlens(per="frame"), vg.buffers.MaxSeqlen(per="frame")]
    )
    router = Router(spec, budgets or EnabledBudgets(costs), "eager", 1)
    call = Call(torch.zeros(layout.total, 1), {}, {}, (), {}, None, layout)
    return router.route(call, router.budgets.costs, timed=True)


def runs_eager_because_it_is_faster(layout, costs):
    return routed(layout, costs).reason == "faster without padding"


@pytest.mark.parametrize(
    ("rows", "squares_matter", "host", "expected"),
    [
        (1000, False, 1.0, False),  # fits closely
        (520, False, 1.0, True),  # half of it is padding, and the host is fast
        (520, False, 60.0, False),  # the host takes longer than the padding does
        (520, True, 1.0, False),  # attention takes so long that padding does not show
    ],
)
def test_a_call_runs_without_a_graph_where_padding_costs_more_than_the_host(rows, squares_matter, host, expected):
    small, large = vg.budgets.Budget(512), vg.budgets.Budget(1024)
    per_square = 1.0 if squares_matter else 0.0
    costs = Costs({small: 5.0, large: 10.0}, per_square, host)
    layout = vg.layouts.Layout(((1, 1, rows),))
    assert runs_eager_because_it_is_faster(layout, costs) is expected


def test_a_call_that_is_larger_than_every_budget_is_split_for_the_memory_it_takes_otherwise():
    small, large = vg.budgets.Budget(512), vg.budgets.Budget(1024)
    costs = Costs({small: 5.0, large: 10.0}, host=1.0)
    assert runs_eager_because_it_is_faster(vg.layouts.Layout(((1, 1, 600),)), costs)
    assert not runs_eager_because_it_is_faster(vg.layouts.Layout(((1, 1, 600),) * 10), costs)


def test_nothing_runs_eager_for_speed_before_something_was_measured():
    budget = vg.budgets.Budget(1024)
    costs = Costs.in_rows([budget])
    assert not costs.measured
    assert not runs_eager_because_it_is_faster(vg.layouts.Layout(((1, 1, 1),)), costs)


def test_frames_are_squared_one_by_one():
    spec = vg.BufferSpec(
        "x", vg.GridTHW(), buffers=[vg.buffers.CuSeqlens(per="frame"), vg.buffers.MaxSeqlen(per="frame")]
    )
    assert spec.usage.squares(vg.layouts.Layout(((3, 2, 2), (1, 4, 4)))) == 3 * 16 + 256
    whole = vg.BufferSpec("x", vg.Lengths(), buffers=[vg.buffers.CuSeqlens()])
    assert whole.usage.squares(vg.layouts.Layout(((1, 1, 3), (1, 1, 5)))) == 9 + 25


@given(strategies.costs(), st.lists(st.integers(1, 600), min_size=1, max_size=8), st.data())
def test_disabled_budgets_are_in_no_route(costs, rows, data):
    budgets, layout = EnabledBudgets(costs), vg.layouts.Layout(tuple((1, 1, n) for n in rows))
    before = routed(layout, costs, budgets)
    disabled = data.draw(st.sets(st.sampled_from(sorted(costs.replays))))
    for budget in disabled:
        budgets.disable(budget, "wrong", "of a test")
    batches = routed(layout, costs, budgets).batches
    assert not batches or sorted(i for one in batches for i in one.items) == [*range(len(rows))]
    assert not disabled & {one.budget for one in batches}
    budgets.enable_all()
    assert routed(layout, costs, budgets) == before


def test_a_report_shows_budgets_times_and_counts():
    from varlen_graphs.calls.report import report
    from varlen_graphs.stats import Stats

    small, large, useless = vg.budgets.Budget(512), vg.budgets.Budget(1024), vg.budgets.Budget(640)
    costs = Costs({small: 1.5, large: 2.0, useless: 2.25}, per_square=1e-6, host=9.0, bytes_per_row=56_000.0)
    stats = Stats(calls=3, items=7)
    stats.count_replay(small, 500)
    stats.count_eager("larger than every budget")
    encoder = attention_encoder([small, large, useless])
    encoder.costs = costs
    store = encoder.executor.store
    store.seconds["captured"] = 1.25
    text = report("the encoder", store, stats, detail=True)
    assert "captured in 1.25 s" in text
    assert (
        "eager runs of the same calls would take some 12.0 times as long" in text
    )  # two calls of 9 ms of the host, and 1.5
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert rows[0][:5] == ["512", "8", "8", "1.500", "1"]
    assert rows[1][5:] == ["not", "used:", "a", "larger", "budget", "takes", "no", "longer"]
    assert "adds 1.049 ms" in text
    assert "takes at least 9.00 ms" in text
    assert "take 56,000 bytes per row" in text
    assert "2.3% padding" in text
    assert "1 eager run: larger than every budget" in text
    assert "times as long" in (short := report("the encoder", store, stats, detail=False))
    assert "1.049 ms" not in short
    new = attention_encoder([small]).report().splitlines()
    assert new[3].split() == ["512", "8", "8", "-", "0"]


def test_a_report_of_many_budgets_lists_those_that_calls_used():
    encoder = attention_encoder([*range(64, 64 + 32 * 20, 32)])
    encoder(torch.randn(100, 8), lengths=[100])
    encoder.drop_budget(64)
    (used,) = encoder.stats.replays

    def listed(text):
        rows = (line.split() for line in text.splitlines())
        return [int(row[0]) for row in rows if len(row) == 5 and row[0].isdigit()]

    assert listed(encoder.report()) == [used.rows]
    assert "18 more budgets, of 96 to 672 rows: not used" in encoder.report()
    assert listed(encoder.report(detail=True)) == [budget.rows for budget in encoder.budgets]


def test_a_call_far_below_the_only_budget_runs_without_a_graph():
    costs = Costs({vg.budgets.Budget(16_384): 60.0}, host=10.0)
    layout = vg.layouts.Layout(((1, 8, 8),))
    assert runs_eager_because_it_is_faster(layout, costs)
