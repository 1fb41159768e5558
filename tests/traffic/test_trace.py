"""`traffic.Trace`: what is counted of calls, and what is written."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support import strategies
from tests.support.encoders import SIMULATED, attention_encoder, attention_spec, rows_for
from varlen_graphs.traffic.trace import Size


@st.composite
def sizes(draw):
    """Of calls, with segments or without."""
    largest, items = draw(st.integers(1, 5000)), draw(st.integers(1, 9))
    rows = draw(st.integers(max(largest, items), largest * items))
    return Size(rows, items, draw(st.integers(0, min(rows, 40))), draw(st.integers(0, largest)), largest)


@pytest.mark.parametrize("backend", ["tape", "eager"])
def test_calls_count_by_their_sizes_however_they_run(backend):
    encoder = attention_encoder(backend=backend)
    encoder(rows_for([5]), lengths=[5])
    with encoder.record() as trace:
        for lengths in ([20, 7], [7, 20], [30], [500]):
            encoder(rows_for(lengths), lengths=lengths)
    encoder(rows_for([5]), lengths=[5])
    assert trace.calls == {Size(27, 2, 2, 20, 20): 2, Size(30, 1, 1, 30, 30): 1, Size(500, 1, 1, 500, 500): 1}
    assert trace.squares == 2 * (20**2 + 7**2) + 30**2 + 500**2
    assert len(trace) == 4


def test_a_stage_counts_once():
    encoder = attention_encoder(spec=attention_spec(rows=vg.inputs.Rows("x", shape=(8,))))
    with encoder.record() as trace, encoder.stage([9, 4]) as stage:
        stage.rows.copy_(rows_for([9, 4]))
    assert trace.calls == {Size(13, 2, 2, 9, 9): 1}


def test_items_on_the_gpu_count_as_the_most_they_may_need_and_are_not_copied():
    """On the tape a tensor on the CPU is one on the GPU."""
    encoder = attention_encoder()
    with encoder.record() as trace:
        encoder(rows_for([20, 7]), lengths=torch.tensor([20, 7]))
    assert trace.calls == {Size(27, 2, 2, 27, 27): 1}
    assert trace.squares == 0


def test_items_on_the_gpu_that_cannot_be_do_not_spoil_a_trace(tmp_path):
    encoder = attention_encoder()
    with encoder.record() as trace:
        encoder(rows_for([20, 7]), lengths=torch.tensor([20, 7]))
        encoder(rows_for([2]), lengths=torch.tensor([1, 1, 1, 1]))
        with pytest.raises(vg.errors.LayoutError):
            encoder.check()
        encoder(rows_for([0]), lengths=torch.tensor([0]))
    trace.save(tmp_path / "trace.json")
    assert vg.traffic.Trace.load(tmp_path / "trace.json").calls == {Size(27, 2, 2, 27, 27): 1}


def test_items_on_the_gpu_may_be_parted_in_a_plan():
    """Without segments nothing says that one of them has nearly all rows."""
    encoder = vg.GraphedEncoder(
        torch.nn.Linear(8, 8), [vg.budgets.Budget(512, items=16)], vg.BufferSpec("input", vg.Lengths()), **SIMULATED
    )
    with encoder.record() as trace:
        encoder(rows_for([400]), lengths=torch.tensor([100] * 4))
    costs = vg.routing.Costs({vg.budgets.Budget(512): 1.0}, host=1.0, bytes_per_row=1e6)
    plan = vg.traffic.plan(trace, max_memory=(64 << 20) + 200 * 10**6 + 10**5, costs=costs)
    assert plan.eager == 0
    assert sum(plan.replays.values()) >= 2


def test_recordings_may_overlap():
    encoder = attention_encoder()
    with encoder.record() as outer:
        encoder(rows_for([5]), lengths=[5])
        with encoder.record() as inner:
            encoder(rows_for([6]), lengths=[6])
        encoder(rows_for([7]), lengths=[7])
    assert (len(outer), len(inner)) == (3, 1)


def test_a_plan_is_made_while_calls_are_counted():
    trace = vg.traffic.Trace()
    trace.count(Size(100, 1, 1, 100, 100), squares=10**4)
    now = trace.copy()
    done = threading.Event()

    def count():
        for rows in range(1, 20_000):
            trace.count(Size(rows, 1, 1, rows, rows))
        done.set()

    thread = threading.Thread(target=count)
    thread.start()
    while not done.is_set():
        vg.traffic.plan(trace, max_graphs=2)
    thread.join()
    assert (now.calls, now.squares, len(trace)) == ({Size(100, 1, 1, 100, 100): 1}, 10**4, 20_000)


def test_a_recording_that_an_error_ends_is_over():
    encoder = attention_encoder()
    with pytest.raises(vg.errors.LayoutError), encoder.record() as trace:
        encoder(rows_for([5]), lengths=[6])
    encoder(rows_for([5]), lengths=[5])
    assert len(trace) == 0


def test_padded_batches_are_not_recorded():
    spec = vg.BufferSpec("input", vg.Lengths("lengths", padded=True))
    encoder = vg.GraphedEncoder(torch.nn.Linear(8, 8), vg.budgets.Budget.padded(2, 16), spec, backend="tape")
    with (
        pytest.raises(vg.errors.SpecError, match=r"list them as a vg\.budgets\.PaddedLadder, or pack"),
        encoder.record(),
    ):
        pass


def test_costs_come_along_as_they_are_known_in_the_end():
    encoder = attention_encoder()
    measured = vg.routing.Costs(dict(zip(encoder.budgets, (1.0, 2.0), strict=True)), host=5.0)
    with encoder.record() as trace:
        assert trace.costs is encoder.costs
        encoder.costs = measured
    assert trace.costs is encoder.costs is measured


def test_what_was_measured_is_in_a_trace_that_is_saved_inside_of_the_block(tmp_path):
    encoder, path = attention_encoder(), tmp_path / "trace.json"
    costs = [vg.routing.Costs(dict(zip(encoder.budgets, (ms, 9.0), strict=True)), host=5.0) for ms in (1.0, 2.0)]
    with encoder.record() as trace:
        encoder(rows_for([5]), lengths=[5])
        encoder.costs = costs[0]
        trace.save(path)
        assert vg.traffic.Trace.load(path).costs.as_json() == costs[0].as_json()
        assert vg.traffic.plan(trace).measured
        now = trace.copy()
    encoder.costs = costs[1]
    assert now.costs is trace.costs is costs[0]


def test_what_was_measured_is_in_a_trace_also_where_no_budget_is_in_use_any_more(tmp_path):
    encoder, path = attention_encoder(memory=100), tmp_path / "trace.json"
    measured = vg.routing.Costs(dict(zip(encoder.budgets, (1.0, 2.0), strict=True)), host=5.0, bytes_per_row=1000.0)
    encoder.costs = measured  # as it is on a GPU before the limit is looked at
    with encoder.record() as trace, pytest.warns(UserWarning, match="no graph fits"):
        encoder(rows_for([20, 7]), lengths=[20, 7])
    assert not encoder.costs.replays
    trace.save(path)
    again = vg.traffic.Trace.load(path)
    assert again.costs.as_json() == measured.as_json()
    for one in (trace, again):
        plan = vg.traffic.plan(one, max_memory="1GiB", costs=encoder.costs)  # which say nothing of any budget
        assert (plan.measured, plan.cost) == (True, 1.0)
    empty = vg.traffic.Trace(encoder.costs)
    empty.calls.update(trace.calls)
    empty.save(path)
    assert vg.traffic.Trace.load(path).costs is None
    assert not vg.traffic.plan(empty).measured


@given(st.dictionaries(sizes(), st.integers(1, 1000)), st.integers(0, 10**15), strategies.costs(4) | st.none())
def test_what_is_written_is_read_again(tmp_path_factory, calls, squares, costs):
    trace = vg.traffic.Trace(costs)
    trace.calls.update(calls)
    trace.squares = squares
    path = tmp_path_factory.mktemp("traces") / "trace.json"
    trace.save(path)
    again = vg.traffic.Trace.load(path)
    assert (again.calls, again.squares) == (trace.calls, trace.squares)
    if costs is None or not costs.measured:
        assert again.costs is None
    else:
        assert again.costs.as_json() == costs.as_json()
        assert again.costs.eager(1000, 10**6) == costs.eager(1000, 10**6)


def test_a_file_is_replaced_only_once_it_is_whole(tmp_path):
    path = tmp_path / "trace.json"
    vg.traffic.Trace().save(path)
    vg.traffic.Trace().save(str(path))
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]
    (tmp_path / "plain").write_text("")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_writers_of_one_file_do_not_disturb_each_other_nor_readers(tmp_path):
    path, trace = tmp_path / "trace.json", vg.traffic.Trace()
    trace.calls.update({Size(rows, 1, 1, rows, rows): rows for rows in range(1, 500)})
    trace.save(path)

    def work(number):
        for _ in range(50):
            if number:
                trace.save(path)
            else:
                assert vg.traffic.Trace.load(path).calls == trace.calls

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(work, number) for number in range(4)]:
            done.result()
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        vg.traffic.Trace().save(tmp_path / "folder")
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


COLUMNS = ["rows", "items", "segments", "longest", "largest", "calls"]


@pytest.mark.parametrize(
    "text",
    [
        *["", "[]", "{}", "é"],
        json.dumps({"columns": COLUMNS, "calls": [[1, 2]], "squares": 0, "costs": None}),
        json.dumps({"columns": COLUMNS, "calls": [[9, 2, 2, 5, 4, 1]], "squares": 0, "costs": None}),
        json.dumps({"columns": COLUMNS, "calls": [[9, 2, 2, 4, 4, 1]], "squares": 0, "costs": None}),
        json.dumps({"columns": COLUMNS[:4], "calls": [[9, 2, 2, 5, 1]], "squares": 0, "costs": None}),
    ],
)
def test_a_file_that_is_no_trace_says_so(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(
        vg.errors.InputError, match=re.escape(f"{path} is not a trace") + ".*expected a file from `Trace.save`"
    ):
        vg.traffic.Trace.load(path)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ([10, 100, 1, 1, 1, 3], "expected no more items, and no more segments, than rows"),
        ([10, 2, 11, 1, 9, 3], "expected no more items, and no more segments, than rows"),
        ([10, 2, 2, 10, 10, 0], "calls is 0: expected an integer of at least 1"),
        ([10, 2, 2, 9, 8, 3], "expected longest <= largest <= rows <= largest * items"),
        ([10, 2], "expected 6 integers, rows, items, segments, longest, largest, calls"),
    ],
)
def test_a_line_of_a_size_that_no_call_has_is_named(tmp_path, line, what):
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"columns": COLUMNS, "calls": [[9, 2, 2, 5, 5, 1], line], "squares": 0, "costs": None}))
    with pytest.raises(vg.errors.InputError, match=re.escape(f"calls[1] is {line}") + ".*" + re.escape(what)):
        vg.traffic.Trace.load(path)


def test_a_trace_says_how_much_is_in_it():
    encoder = attention_encoder()
    with encoder.record() as trace:
        for lengths in ([3, 3], [3, 3], [6]):
            encoder(rows_for(lengths), lengths=lengths)
    assert repr(trace) == "Trace(3 calls of 2 sizes)"
