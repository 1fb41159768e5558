"""`Budget`, `Ladder` and `resolve_budgets`: capacities of graphs, and errors that say what was expected."""

import itertools
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support.encoders import attention_encoder, attention_spec, rows_for
from tests.support.memory import memory_limit
from varlen_graphs.budgets.ladder import row_count_for
from varlen_graphs.declaration import budgets
from varlen_graphs.layouts.usage import UsageMeter


def resolve_budgets(form, multiple):
    return budgets.resolve_budgets(form, multiple, UsageMeter(vg.Lengths(), {"item"}))


def test_plain_integers_mean_rows_and_are_rounded_up():
    assert [b.rows for b in resolve_budgets([1000, 100], multiple=4)] == [112, 1008]
    assert [b.rows for b in resolve_budgets(100, multiple=12)] == [144]  # lcm(16, 12) is 48


def test_plain_integers_have_capacities_in_proportion():
    (budget,) = resolve_budgets(4096, multiple=1)
    assert budget == vg.budgets.Budget(rows=4096, items=64, segments=64, max_seqlen=4096)


def test_a_budget_says_each_capacity_for_itself():
    budget = vg.budgets.Budget(1024, items=100)
    assert (budget.items, budget.segments, budget.max_seqlen) == (100, 100, 1024)
    assert vg.budgets.Budget(1024, items=2).segments == 16
    assert vg.budgets.Budget(1024, segments=3, max_seqlen=64) == vg.budgets.Budget(1024, 16, 3, 64)


def test_rows_of_a_budget_are_rounded_up_to_the_row_ratio_and_never_down():
    (budget,) = resolve_budgets(vg.budgets.Budget(1001, items=3), multiple=4)
    assert (budget.rows, budget.items, budget.max_seqlen) == (1004, 3, 1004)


@given(st.integers(1, 500), st.integers(500, 20_000), st.floats(1.05, 3), st.sampled_from([1, 4, 12, 49]))
def test_a_ladder_reaches_from_min_to_max_in_steps_no_larger_than_asked(smallest, largest, step, multiple):
    rows = [b.rows for b in resolve_budgets(vg.Ladder(smallest, largest, step), multiple)]
    assert rows == sorted(set(rows))
    assert rows[-1] >= largest
    assert all(r % multiple == 0 and r % 16 == 0 for r in rows)
    assert all(b <= a * step + 64 * step + 16 * multiple for a, b in itertools.pairwise(rows))


@given(st.integers(1, 500), st.integers(500, 20_000), st.floats(1.01, 3))
def test_row_counts_between_the_ends_are_parts_of_tiles_then_a_little_short_of_them(smallest, largest, step):
    first, *rows, last = vg.Ladder(smallest, largest + 1, step).row_counts()
    assert all(r % 32 == 0 if r <= 1024 else r % 64 == 48 for r in rows)
    assert (first, last) == (smallest, largest + 1)


def test_the_default_ladder_is_fine_and_holds_the_usual_squares_with_hardly_any_padding():
    rows = list(vg.Ladder().row_counts())
    assert (rows[0], rows[-1], len(rows)) == (256, 16_384, 79)
    squares = [(side // patch) ** 2 for side in (336, 448, 672, 896, 1344) for patch in (14, 16)]
    assert all(min(count for count in rows if count >= square) <= 1.05 * square for square in squares)


def test_a_ladder_for_short_items_says_so():
    plain, short, windows = (
        list(vg.Ladder(*ends)) for ends in ((256, 1024), (256, 1024, 1.05, 16), (256, 1024, 1.05, 64, 16))
    )
    assert [(b.items, b.segments) for b in (plain[0], plain[-1])] == [(8, 8), (16, 16)]
    assert [(b.items, b.segments) for b in (short[0], short[-1])] == [(16, 16), (64, 64)]
    assert [(b.items, b.segments) for b in (windows[0], windows[-1])] == [(8, 16), (16, 64)]
    assert [b.rows for b in plain] == [b.rows for b in short] == list(vg.Ladder(256, 1024).row_counts())


@given(st.integers(1, 200_000))
def test_the_row_count_for_some_rows_is_the_next_one_of_a_ladder(rows):
    count = row_count_for(rows)
    taken = {*range(32, 1025, 32), *range(1088 - 16, 201_000, 64)}
    assert count == min(other for other in taken if other >= rows)
    assert row_count_for(count) == count


@pytest.mark.parametrize(
    ("memory", "rows"),
    [("2GiB", 31_744), ("2 gib", 31_744), ("1.5GB", 21_856), (2**30, 15_360), (f"{(64 << 20) + 65_536_000}B", 992)],
)
def test_an_automatic_ladder_goes_as_far_as_memory_does(memory, rows):
    """64 KiB a row, and 64 MiB of scratch."""
    assert vg.Ladder.auto(memory, bytes_per_row=2**16) == vg.Ladder(max=rows)


def test_an_automatic_ladder_has_no_more_rows_than_kernels_count():
    assert vg.Ladder.auto("900000 GiB", bytes_per_row=1.0).max == 2**31 - 16


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.parametrize(
    "budget", [vg.budgets.Budget(2**31 - 64, items=1), vg.budgets.Budget(64, items=2**31 - 1)], ids=str
)
def test_budgets_without_memory_for_their_inputs_say_so(budget):
    encoder = attention_encoder([budget], spec=attention_spec(rows=vg.inputs.Rows("x", (8,))))
    with (
        memory_limit(2**30),
        pytest.raises(vg.errors.BudgetError, match="no memory for the inputs of the largest budget, Bud"),
    ):
        encoder(rows_for([6]), lengths=[6])


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_a_budget_without_memory_for_its_segments_cannot_be_captured():
    encoder = attention_encoder([vg.budgets.Budget(64, segments=2**31 - 1)])
    with (
        memory_limit(2**30),
        pytest.raises(vg.errors.CaptureError, match="no budget could be captured, because memory is shor"),
    ):
        encoder(rows_for([6]), lengths=[6])


def test_an_automatic_ladder_begins_lower_where_memory_is_short():
    assert vg.Ladder.auto("80MiB", bytes_per_row=2**17) == vg.Ladder(min=128, max=128)


@pytest.mark.parametrize("memory", ["", "two", "GiB", "-1GiB", "1TiB", "1.GiB", "1IB", None])
def test_what_is_no_memory_says_so(memory):
    expected = "expected a number of bytes, or one with a unit, such as '2GiB'; units are B, KB, MB, GB, KiB, MiB, GiB"
    with pytest.raises(vg.errors.BudgetError, match=expected):
        vg.Ladder.auto(memory, bytes_per_row=1000)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: vg.budgets.Budget(1024, items=0),
            "Budget(items=0): no item could use it; expected items to be an integer of",
        ),
        (
            lambda: vg.Ladder.auto("1MiB", 2**17),
            "memory '1MiB' is too little for any graph: expected 64 MiB of scratch memory plus 16 rows of 131,072 bytes",
        ),
        (lambda: vg.budgets.Budget(0), "Budget(rows=0): no item could use it"),
        (lambda: vg.budgets.Budget(64, segments=-1), "Budget(segments=-1)"),
        (lambda: vg.budgets.Budget(64, max_seqlen=1.5), "Budget(max_seqlen=1.5)"),
        (lambda: vg.budgets.Budget(True), "Budget(rows=True)"),
        (
            lambda: vg.budgets.Budget(2**62),
            "Budget(rows=4611686018427387904): expected rows to be below 2**31, because kernels",
        ),
        (lambda: resolve_budgets([2**31 - 15], 1), "expected rows to be below 2**31"),
        (lambda: vg.budgets.Budget(64, items=2**31), "Budget(items=2147483648): expected items to be below 2**31"),
        (lambda: vg.budgets.Budget(64, segments=2**62), "expected segments to be below 2**31"),
        (lambda: vg.budgets.Budget(64, max_seqlen=2**63 - 1), "expected max_seqlen to be below 2**31"),
        (lambda: vg.budgets.Budget.padded(2**16, 2**15), "expected rows to be below 2**31"),
        (lambda: vg.Ladder(256, 2**40), "Ladder(256, 1099511627776): expected 1 <= min <= max, and fewer than 2**31"),
        (lambda: vg.budgets.PaddedLadder(2**16, 2**15), "and fewer than 2**31 rows"),
        (lambda: vg.Ladder(rows_per_item=0), "Ladder(rows_per_item=0): expected an integer of at least 1"),
        (lambda: vg.Ladder(512, 256), "Ladder(512, 256): expected 1 <= min <= max"),
        (
            lambda: vg.Ladder(step=1.0),
            "expected the ratio of neighbouring budgets, above 1 and at most 4, for example 1.1",
        ),
        (lambda: vg.Ladder(256, 1024, 64), "Ladder(step=64): expected the ratio of neighbouring budgets"),
        (lambda: resolve_budgets([], 1), "budgets is empty: expected at least one row count or Budget, or a Ladder"),
        (lambda: resolve_budgets(["big"], 1), "budget 'big' is a str: expected an integer (rows) or a Budget"),
        (lambda: resolve_budgets([-5], 1), "Budget(rows=-5)"),
    ],
)
def test_bad_budgets_say_what_was_expected(make, message):
    with pytest.raises(vg.errors.BudgetError, match=re.escape(message)):
        make()
