"""`traffic.plan`: the cheapest budgets for a trace, against every other choice."""

import itertools
import math
import random
import re
import time
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import varlen_graphs as vg
from benchmarks.traces import rows_of, trace
from tests.support.encoders import UNVERIFIED, attention_encoder, attention_spec
from tests.support.towers import distance, pixels, qwen2_tower
from varlen_graphs.budgets.ladder import row_count_for
from varlen_graphs.budgets.memory_size import SCRATCH
from varlen_graphs.layouts.usage import Usage
from varlen_graphs.routing.costs import REPLAY_ROWS
from varlen_graphs.routing.packing import pack
from varlen_graphs.traffic.planning import ASSUMED, evaluate
from varlen_graphs.traffic.trace import Size


@st.composite
def sizes(draw, most_rows=1200):
    """A call's: no item, segment or longest segment that its rows have no room for."""
    rows = draw(st.integers(1, most_rows))
    items = draw(st.integers(1, min(rows, 6)))
    segments = draw(st.integers(items, max(items, min(rows, 12))))
    longest = draw(st.integers(-(-rows // segments), rows - items + 1))
    largest = draw(st.integers(max(longest, -(-rows // items)), rows - items + 1))
    return Size(rows, items, segments, longest, largest)


@st.composite
def measured(draw):
    """Costs of some budgets, more for more rows: by no law, and with steps that cost next to nothing."""
    rows = sorted(draw(st.sets(st.integers(1, 60).map(lambda n: 32 * n), min_size=1, max_size=5)))
    rises = draw(st.lists(st.sampled_from([0.0, 1e-12, 0.1, 1.0, 7.5]), min_size=len(rows), max_size=len(rows)))
    costs = itertools.accumulate(rises, initial=draw(st.floats(0.1, 5)))
    replays = {vg.budgets.Budget(count): cost for count, cost in zip(rows, [*costs][1:], strict=True)}
    return vg.routing.Costs(replays, per_square=1e-6, host=3.0, bytes_per_row=draw(st.sampled_from([None, 1000.0])))


def trace_of(calls, costs=None):
    made = vg.traffic.Trace(costs)
    made.calls.update(calls)
    return made


histograms = st.dictionaries(sizes(), st.integers(1, 50), min_size=1, max_size=7)
any_costs = measured() | st.none()


def replay_cost(rows, costs):
    return costs.replay(rows) if costs else rows + REPLAY_ROWS


@given(histograms, st.integers(1, 6), any_costs)
def test_no_other_choice_of_row_counts_costs_less(calls, most, costs):
    plan = vg.traffic.plan(trace_of(calls, costs), max_graphs=most)
    wanted = Counter()
    for size, count in calls.items():
        wanted[row_count_for(size.rows)] += count
    totals = [
        sum(count * replay_cost(min(r for r in chosen if r >= rows), costs) for rows, count in wanted.items())
        for size in range(1, most + 1)
        for chosen in itertools.combinations(wanted, size)
        if max(wanted) in chosen
    ]
    assert plan.cost == pytest.approx(min(totals), rel=1e-6)
    assert len(plan.budgets) <= most


@settings(max_examples=30)
@given(st.dictionaries(sizes(), st.integers(1, 50), min_size=1, max_size=3), st.integers(1, 2), any_costs)
def test_no_other_budgets_cost_less_whatever_they_have_room_for(calls, most, costs):
    """Room for items, segments and their lengths taken from any call: budgets that do not nest are among these."""
    rooms = itertools.product(*({size[at] for size in calls} for at in (1, 2, 3)))
    rows = {row_count_for(size.rows) for size in calls}
    budgets = [vg.budgets.Budget(count, *room) for count, room in itertools.product(rows, rooms)]
    least = min(
        sum(
            count * min((replay_cost(b.rows, costs) for b in chosen if b.holds(*size[:4])), default=float("inf"))
            for size, count in calls.items()
        )
        for size in range(1, most + 1)
        for chosen in itertools.combinations(budgets, size)
    )
    assert vg.traffic.plan(trace_of(calls, costs), max_graphs=most).cost <= least * (1 + 1e-6)


def least_cost(calls, most, costs):
    """The cost of the best plan, by the plain recursion over all row counts and all that come before."""
    wanted = Counter()
    for size, count in calls.items():
        wanted[row_count_for(size.rows)] += count
    rows = sorted(wanted)
    before = [*itertools.accumulate((wanted[one] for one in rows), initial=0)]
    best = [0.0] + [math.inf] * len(rows)
    for _ in range(most):
        best = [0.0] + [
            min(
                best[end],
                *(best[n] + (before[end] - before[n]) * replay_cost(rows[end - 1], costs) for n in range(end)),
            )
            for end in range(1, len(rows) + 1)
        ]
    return best[-1]


falling = st.dictionaries(
    st.integers(1, 300).map(lambda n: vg.budgets.Budget(32 * n)), st.floats(0.1, 50), min_size=1
).map(lambda replays: vg.routing.Costs(replays, host=3.0))


@settings(max_examples=60)
@given(
    st.dictionaries(st.integers(1, 9000), st.integers(1, 500), min_size=1, max_size=60),
    st.integers(1, 20),
    any_costs | falling,
)
def test_a_plan_costs_what_the_plain_recursion_finds(lengths, most, costs):
    calls = {Size(rows, 1, 1, rows, rows): count for rows, count in lengths.items()}
    plan = vg.traffic.plan(trace_of(calls, costs), max_graphs=most)
    assert plan.cost == pytest.approx(least_cost(calls, most, costs), rel=1e-6)
    assert len(plan.budgets) <= most


def test_thousands_of_sizes_are_planned_at_once():
    dice = random.Random(0)
    calls = {Size(rows, 1, 1, rows, rows): dice.randint(1, 20) for rows in dice.sample(range(100, 400_000), 4000)}
    start = time.process_time()
    assert len(vg.traffic.plan(trace_of(calls), max_graphs=64).budgets) == 64
    assert time.process_time() - start < 5


@given(histograms, st.integers(1, 9), any_costs)
def test_budgets_nest_hold_every_call_and_are_all_of_use(calls, most, costs):
    plan = vg.traffic.plan(trace_of(calls, costs), max_graphs=most)
    for smaller, larger in itertools.pairwise(plan.budgets):
        assert larger.holds(smaller.rows, smaller.items, smaller.segments, smaller.max_seqlen)
        assert replay_cost(larger.rows, costs) > replay_cost(smaller.rows, costs)  # or the smaller one is never used
    reached = Counter()
    for size, count in calls.items():
        reached[next(budget for budget in plan.budgets if budget.holds(*size[:4]))] += count
    assert plan.replays == reached
    assert plan.eager == 0
    assert plan.rows == sum(size.rows * count for size, count in calls.items())
    assert plan.padding == sum(budget.rows * count for budget, count in reached.items()) - plan.rows


@given(histograms, st.integers(1, 9))
def test_more_graphs_never_cost_more(calls, most):
    few, many = (vg.traffic.plan(trace_of(calls), max_graphs=graphs) for graphs in (most, most + 1))
    assert many.cost <= few.cost
    assert len(many.budgets) - len(few.budgets) in (0, 1)


@given(histograms, st.integers(1, 9), st.integers(1, 1300))
def test_a_plan_keeps_to_its_memory_and_loses_no_call(calls, most, rows):
    costs = vg.routing.Costs({vg.budgets.Budget(64): 1.0, vg.budgets.Budget(2048): 9.0}, host=3.0, bytes_per_row=1000.0)
    try:
        plan = vg.traffic.plan(trace_of(calls), max_graphs=most, max_memory=SCRATCH + rows * 1000, costs=costs)
    except vg.errors.BudgetError:
        largest = rows // 16 * 16
        assert all(size.largest > largest for size in calls) or not largest
        return
    assert plan.memory == plan.budgets[-1].rows * 1000 <= rows * 1000
    assert plan.replays.total() + plan.eager >= sum(calls.values())
    assert all(plan.replays[budget] for budget in plan)
    assert plan.padding >= 0


def test_what_is_too_large_is_parted_or_runs_eager():
    costs = vg.routing.Costs(
        {vg.budgets.Budget(256): 1.0, vg.budgets.Budget(1024): 2.0}, host=3.0, bytes_per_row=2.0**20
    )
    calls = {
        Size(1500, 6, 12, 250, 250): 10,
        Size(900, 1, 1, 900, 900): 3,
        Size(900, 2, 9, 100, 800): 2,  # frames fit, but the item does not
        Size(300, 1, 1, 300, 300): 5,
    }
    plan = vg.traffic.plan(trace_of(calls), max_memory="576 MiB", costs=costs)  # 512 rows
    assert plan.replays == {vg.budgets.Budget(320, 1, 1): 5, vg.budgets.Budget(512, 6, 12): 30}
    assert plan.eager == 5
    assert plan.rows == 10 * 1500 + 5 * 300
    assert plan.padding == 5 * 20 + 10 * (3 * 512 - 1500)


LIMITED = vg.routing.Costs({vg.budgets.Budget(64): 5.0, vg.budgets.Budget(2048): 20.0}, host=3.0, bytes_per_row=1000.0)


def test_parts_are_of_whole_items():
    """Where all items but the largest are of one size, a plan for a limit of memory is what an encoder does with it."""
    calls = [[300, 300, 300], [100] * 8, [90, 410, 90], [230, 210], [700], [40]]
    encoder = attention_encoder()
    with encoder.record() as made:
        for lengths in calls:
            encoder(torch.randn(sum(lengths), 8), lengths=lengths)
    plan = vg.traffic.plan(made, max_memory=SCRATCH + 480 * 1000, costs=LIMITED)
    assert plan.budgets[-1].rows <= 480
    encoder = attention_encoder(budgets=plan)
    for lengths in calls:
        encoder(torch.randn(sum(lengths), 8), lengths=lengths)
    assert (encoder.stats.replays, encoder.stats.padding) == (plan.replays, plan.padding)
    assert encoder.stats.eager == {"larger than every budget": plan.eager}


@given(st.lists(st.lists(st.integers(1, 600), min_size=1, max_size=6), min_size=1, max_size=5), st.integers(600, 1200))
def test_a_call_is_planned_to_run_eager_only_where_an_item_fits_no_replay(calls, rows):
    made = trace_of(Counter(Size(sum(call), len(call), len(call), max(call), max(call)) for call in [[100], *calls]))
    plan = vg.traffic.plan(made, max_memory=SCRATCH + rows * 500, costs=LIMITED)
    chosen = vg.routing.Costs.in_rows(plan.budgets)
    batches = [pack([Usage(length, 1, 1, length) for length in call], chosen) for call in calls]
    assert plan.eager == sum(any(one.budget is None for one in of_call) for of_call in batches)


def test_an_item_is_not_parted_at_its_frames():
    spec = attention_spec(
        layout=vg.GridTHW(), buffers=[vg.buffers.CuSeqlens(per="frame"), vg.buffers.MaxSeqlen(per="frame")]
    )
    calls = [[(8, 10, 10), (1, 10, 10)], [(4, 10, 10), (4, 10, 10), (1, 10, 10)]]
    encoder = attention_encoder(spec=spec)
    with encoder.record() as made:
        for grid in calls:
            encoder(torch.randn(rows_of(grid), 8), grid_thw=grid)
    assert {size.largest for size in made.calls} == {800, 400}
    plan = vg.traffic.plan(made, max_memory=SCRATCH + 512 * 1000, costs=LIMITED)
    encoder = attention_encoder(budgets=plan, spec=spec)
    for grid in calls:
        encoder(torch.randn(rows_of(grid), 8), grid_thw=grid)
    assert encoder.stats.eager == {"larger than every budget": plan.eager} == {"larger than every budget": 1}


def test_groups_are_not_parted():
    spec = vg.BufferSpec(
        "x", vg.Lengths(columns=[vg.layouts.NestedColumn("groups")]), [vg.buffers.CuSeqlens(), vg.buffers.MaxSeqlen()]
    )
    encoder = attention_encoder(spec=spec)
    with encoder.record() as made:
        encoder(torch.randn(600, 8), lengths=[100] * 6, groups=[[0] * 4, [0] * 2])
    assert made.calls == {Size(600, 6, 6, 100, 400): 1}
    with pytest.raises(vg.errors.BudgetError, match="no call fits the 352 rows"):
        vg.traffic.plan(made, max_memory=SCRATCH + 352 * 1000, costs=LIMITED)


def test_costs_come_from_the_trace_or_from_elsewhere():
    slow, fast = (vg.routing.Costs({vg.budgets.Budget(512): ms}, per_square=1e-3, host=3.0) for ms in (8.0, 2.0))
    made = trace_of({Size(500, 1, 1, 500, 500): 10}, slow)
    made.squares = 10 * 500**2
    assert vg.traffic.plan(made).cost == 80
    assert vg.traffic.plan(made, costs=fast).cost == 20
    assert vg.traffic.plan(made).attention == pytest.approx(2500)
    assert vg.traffic.plan(made).measured
    assumed = vg.traffic.plan(trace_of(made.calls))
    assert (assumed.measured, assumed.memory, assumed.cost) == (False, None, 10 * (512 + 512))


def mixed(count, seed):
    """Loads of a seeded trace of calls with one to six images of 224 to 1344 pixels, and videos."""
    layouts = [*trace("mix4", count, seed), *trace("video", count, seed)]
    return Counter(Size(rows_of(one), len(one), *frames_of(one), max(t * h * w for t, h, w in one)) for one in layouts)


def frames_of(layout):
    """How many there are, and rows of the longest."""
    return sum(t for t, _, _ in layout), max(h * w for _, h, w in layout)


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_pads_a_mixed_trace_a_quarter_less_than_powers_of_two_do(seed):
    made = trace_of(mixed(400, seed))
    smallest, largest = (pick(size.rows for size in made.calls) for pick in (min, max))
    powers = [2**n for n in range(20) if smallest <= 2**n < 2 * largest]
    doubling = evaluate(made, powers, ASSUMED)
    plan = vg.traffic.plan(made, max_graphs=len(powers))
    assert doubling.rows == plan.rows
    assert plan.padding <= 0.75 * doubling.padding
    unseen = evaluate(trace_of(mixed(400, seed + 100)), [budget.rows for budget in plan], ASSUMED)
    assert unseen.padding_share <= plan.padding_share + 0.02  # a plan holds for calls like those of its trace


def test_an_encoder_replays_what_was_planned():
    encoder = attention_encoder(budgets=[2048])
    calls = [[40, 25], [64], [300], [290, 7], [5, 5, 5, 5], [700]]

    def run():
        for lengths in calls:
            encoder(torch.randn(sum(lengths), 8), lengths=lengths)

    with encoder.record() as made:
        run()
    plan = vg.traffic.plan(made, max_graphs=3)
    encoder = attention_encoder(budgets=plan)
    run()
    assert encoder.budgets == plan.budgets
    assert encoder.stats.replays == plan.replays
    assert (encoder.stats.rows, encoder.stats.padding) == (plan.rows, plan.padding)


@pytest.mark.parametrize("seen", [True, False])
def test_windows_and_items_on_the_gpu_are_planned_for(seen):
    """On the tape a tensor on the CPU is one on the GPU."""
    tower = qwen2_tower(family="qwen2_5_vl")
    dice = random.Random(0)

    def item():
        return dice.randint(1, 3), 2 * dice.randint(1, 4), 2 * dice.randint(1, 4)

    calls = [[item() for _ in range(dice.randint(1, 4))] for _ in range(12)]

    def make(budgets):
        layouts = vg.options.GpuLayouts(min_segment_rows=4, simulated=True)
        return vg.recipes.qwen2_5_vl(tower, budgets, backend="tape", layouts=layouts, verify=UNVERIFIED)

    def run(encoder, grid):
        return encoder(pixels(grid), grid_thw=grid if seen else torch.tensor(grid))

    wide = make(vg.budgets.Budget(768, items=16, segments=192))
    with wide.record() as made:
        expected = [run(wide, grid) for grid in calls]
    plan = vg.traffic.plan(made, max_graphs=2)
    encoder = make(plan)
    with encoder.record() as again:
        assert max(distance(run(encoder, grid), output) for grid, output in zip(calls, expected, strict=True)) < 1e-5
    assert again.calls == made.calls  # what the GPU alone saw, it alone sees again
    assert (encoder.stats.replays, encoder.stats.padding) == (plan.replays, plan.padding)
    assert encoder.budgets[-1].segments == max(size.segments for size in made.calls)


def test_what_no_segment_is_counted_for_has_room_for_its_items():
    (budget,) = vg.traffic.plan(trace_of({Size(100, 7, 0, 0, 20): 1}))
    assert budget == vg.budgets.Budget(128, 7, 7)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: vg.traffic.plan(vg.traffic.Trace()),
            vg.errors.InputError,
            "the trace has no calls: expected calls inside",
        ),
        (
            lambda: vg.traffic.plan("trace.json"),
            vg.errors.InputError,
            "plan() got a str and costs of NoneType: expected a Trace, such as Trace.load(path)",
        ),
        (
            lambda: vg.traffic.plan(vg.traffic.Trace(), costs="other.json"),
            vg.errors.InputError,
            "plan() got a Trace and costs of str: expected",
        ),
        (
            lambda: vg.traffic.plan(trace_of({Size(9, 1, 1, 9, 9): 1}), max_graphs=0),
            vg.errors.BudgetError,
            "max_graphs=0: expected an integer of at",
        ),
        (
            lambda: vg.traffic.plan(trace_of({Size(9, 1, 1, 9, 9): 1}), max_memory="1GiB"),
            vg.errors.BudgetError,
            "the bytes per row were not measured: record with an encoder that captures",
        ),
        (
            lambda: vg.traffic.plan(
                trace_of({Size(900, 1, 1, 900, 900): 1}),
                max_memory=SCRATCH + 64,
                costs=vg.routing.Costs({vg.budgets.Budget(9): 1.0}, host=1.0, bytes_per_row=1.0),
            ),
            vg.errors.BudgetError,
            "no call fits the 64 rows that max_memory=67108928 has room for",
        ),
    ],
)
def test_what_cannot_be_planned_says_why(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()
