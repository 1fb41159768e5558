"""`python -m varlen_graphs plan`: what it prints and draws."""

import json
import math

import pytest

import varlen_graphs as vg
from varlen_graphs.__main__ import main
from varlen_graphs.traffic.planning import ASSUMED, evaluate
from varlen_graphs.traffic.trace import Size

CALLS = {Size(200, 1, 1, 200, 200): 30, Size(700, 3, 3, 300, 300): 10, Size(1500, 6, 9, 250, 250): 5}


@pytest.fixture
def traces(tmp_path):
    """The same calls, without costs and with them."""
    costs = vg.routing.Costs(
        {vg.budgets.Budget(rows): rows / 256 for rows in (256, 2048)}, 1e-6, host=5.0, bytes_per_row=2.0**15
    )
    for name, known in (("bare", None), ("measured", costs)):
        trace = vg.traffic.Trace(known)
        trace.calls.update(CALLS)
        trace.squares = 45 * 10**6
        trace.save(tmp_path / f"{name}.json")
    return tmp_path


def printed(capsys, *arguments):
    status = main(["plan", *map(str, arguments)])
    came = capsys.readouterr()
    assert bool(status) == bool(came.err)
    return came.out, came.err


def cells(text, name):
    (line,) = (line for line in text.splitlines() if line.startswith(name))
    return line.removeprefix(name).split()


def test_a_plan_stands_beside_the_default_ladder_and_powers_of_two(traces, capsys):
    text, _ = printed(capsys, traces / "measured.json", "--max-graphs", 2)
    assert text.startswith("45 calls of 2.0 items and 456 rows on average\n")
    assert cells(text, "plan") == ["2", "2", "30.6%", "2.646", "0.05", "0"]
    graphs, used, *_, eager = cells(text, "Ladder()")
    assert (graphs, used, eager) == ("79", "3", "0")
    assert cells(text, "powers of two")[:2] == ["4", "3"]
    assert "without attention, which takes 1.000 ms per call with any budgets" in text


def test_a_bar_is_the_rows_that_are_replayed(traces, capsys):
    text, _ = printed(capsys, traces / "bare.json", "--max-graphs", 2)
    assert "cost in rows plus 512 per replay: no time was measured" in text
    first, second = text.splitlines()[-2:]
    assert first.split() == ["224", "1", "1", "30", "10.7%", "#" * 11 + "."]
    assert second.split() == ["1520", "6", "9", "15", "36.4%", "#" * 25 + "." * 15]


def test_costs_may_come_from_another_trace(traces, capsys):
    text, _ = printed(capsys, traces / "bare.json", "--costs", traces / "measured.json", "--max-memory", "94MiB")
    assert cells(text, "plan") == ["3", "3", "4.4%", "1.944", "0.02", "0"]


def test_what_runs_eager_is_told(traces, capsys):
    text, _ = printed(capsys, traces / "measured.json", "--max-memory", "71MiB")  # 224 rows
    assert cells(text, "plan")[-1] == "15"
    assert "calls that no budget holds run eager" in text


def test_calls_that_run_eager_do_not_make_the_others_look_cheaper(traces, capsys):
    before = cells(printed(capsys, traces / "bare.json", "--max-graphs", 2)[0], "Ladder()")
    broken(traces / "bare.json", lambda trace: trace["calls"].append([20_000, 1, 1, 20_000, 20_000, 45]))
    after = cells(printed(capsys, traces / "bare.json", "--max-graphs", 2)[0], "Ladder()")  # up to 16,384 rows
    assert (before[-1], after[-1]) == ("0", "45")
    assert before[3] == after[3]
    alone = evaluate(vg.traffic.Trace.load(traces / "bare.json"), [32], ASSUMED)
    assert (alone.eager, alone.cost_per_call) == (alone.calls, 0)  # none is replayed


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("name", ["bare", "measured"])
def test_it_is_drawn_where_it_is_asked_for(traces, capsys, suffix, name):
    pytest.importorskip("matplotlib")
    printed(capsys, traces / f"{name}.json", "--plot", traces / f"plan.{suffix}")
    assert (traces / f"plan.{suffix}").stat().st_size > 10_000


def broken(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("at", "value"),
    [
        *[(0, value) for value in ("a", 0, -5, 200.5, None, True)],
        *[(1, 0), (2, -1), (3, -1), (3, [7]), (4, 0)],
        *[(5, value) for value in (0, -3, 1.0, "many")],
    ],
)
def test_a_call_that_cannot_be_is_named(traces, capsys, at, value):
    path = broken(traces / "measured.json", lambda trace: trace["calls"][1].__setitem__(at, value))
    said = printed(capsys, path)[1]
    what = ("rows", "items", "segments", "longest", "largest", "calls")[at]
    assert said.startswith(f"{path} is not a trace")
    assert f"{what} is {value!r}: expected an integer of at least {0 if at in (2, 3) else 1}" in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("replays", value) for value in ([], 7, [[1]], [[256, 4, 4, 256, "fast"]])],
        *[("replays", [[256, 4, 4, 256, cost]]) for cost in (0, -1.0, math.nan, math.inf, 10**400, True, None)],
        *[("replays", [[rows, 4, 4, 256, 1.0]]) for rows in (0, -256, 256.5, "a")],
        *[(name, value) for name in ("host", "eager_factor") for value in (0, -1.0, math.nan, math.inf, "x", None)],
        *[("per_square", value) for value in (-1.0, math.nan, "x", None)],
        *[("bytes_per_row", value) for value in (0, -1.0, math.nan, "x")],
    ],
)
def test_costs_that_cannot_be_are_refused(traces, capsys, name, value):
    path = broken(traces / "measured.json", lambda trace: trace["costs"].__setitem__(name, value))
    said = printed(capsys, path, "--max-memory", "1GiB")[1]
    assert said.startswith(f"{path} is not a trace")
    assert "\n" not in said.strip()


@pytest.mark.parametrize(("name", "value"), [("squares", "x"), ("squares", -1), ("costs", []), ("costs", 0)])
def test_other_numbers_of_a_trace_are_checked(traces, capsys, name, value):
    path = broken(traces / "measured.json", lambda trace: trace.__setitem__(name, value))
    assert f"{path} is not a trace" in printed(capsys, path)[1]


def test_what_goes_wrong_is_said_in_a_line(traces, capsys):
    assert "No such file" in printed(capsys, traces / "none.json")[1]
    assert "is not a trace" in printed(capsys, __file__)[1]
    assert "expected a number of bytes" in printed(capsys, traces / "measured.json", "--max-memory", "much")[1]
    assert "the bytes per row were not measured" in printed(capsys, traces / "bare.json", "--max-memory", "1GiB")[1]


def test_an_amount_of_memory_that_is_none_names_its_unit(traces, capsys):
    for trace in ("bare", "measured"):
        _, error = printed(capsys, traces / f"{trace}.json", "--max-memory", "2XB")
        assert error.startswith("memory '2XB' has the unit 'XB': expected a number of bytes, or one with a unit")


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"varlen_graphs {vg.__version__}, torch ")
