"""`Capture(warmup=...)` and `Trace.load`: whatever is in a file, it is read, or refused by an `InputError`.

A refused warm-up file stops no start: it is ignored with a warning, unless asked otherwise.
"""

import contextlib
import json
import tempfile
import warnings
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support.encoders import attention_encoder, attention_spec, rows_for
from varlen_graphs.attention import timing
from varlen_graphs.traffic.trace import Size

SHAPED = attention_spec(rows=vg.inputs.Rows("x", shape=(8,)))

FOLDER = Path(tempfile.mkdtemp(prefix="damaged-"))


def costs(budgets):
    replays = {budget: float(at) for at, budget in enumerate(budgets, 1)}
    return vg.routing.Costs(replays, per_square=1e-6, host=5.0, bytes_per_row=1000.0)


def good_warmup():
    """Return what an encoder saves, with something in each part."""
    path, before = FOLDER / "good_warmup.json", dict(timing.results)
    key = torch.device("cpu"), torch.float32, torch.Size([4, 2, 8]), torch.Size([4, 2, 8]), 4, 4, None, None, "a", "b"
    timing.results[key] = timing.Timed("b", 0.5)
    try:
        encoder = attention_encoder(spec=SHAPED)
        encoder(rows_for([20]), lengths=[20], scale=2.0)
        encoder.costs = costs(encoder.budgets)
        encoder.save_warmup(path)
    finally:
        timing.results.clear()
        timing.results.update(before)
    (section,) = json.loads(path.read_text())["encoders"]
    return section  # a file of this alone is one of an earlier version


def good_file():
    """The same among sections of others."""
    good = good_warmup()
    other = good | {"name": "other", "identity": good["identity"] | {"weights": "other"}}
    return {"encoders": [other, good]}


def good_trace():
    path, trace = FOLDER / "good_trace.json", vg.traffic.Trace(costs([vg.budgets.Budget(256), vg.budgets.Budget(512)]))
    trace.calls.update({Size(200, 1, 1, 200, 200): 30, Size(700, 3, 3, 300, 300): 10})
    trace.squares = 10**6
    trace.save(path)
    return json.loads(path.read_text())


def load_warmup(text, on_bad_warmup="error"):
    """Start an encoder from a file, and encode and plan with what it says."""
    path, before = FOLDER / "warmup.json", dict(timing.results)
    path.write_text(text)
    try:
        options = vg.options.Capture(warmup=path, lazy=True, on_bad_warmup=on_bad_warmup)
        encoder = attention_encoder(spec=SHAPED, capture=options)
        for lengths in ([20], [90, 30]):
            assert encoder(rows_for(lengths), lengths=lengths).isfinite().all()
        encoder.capture_pending(None)
        assert encoder(rows_for([20, 100]), lengths=[20, 100]).isfinite().all()
        encoder.save_warmup(path)
        encoder.report()
    finally:
        timing.results.clear()
        timing.results.update(before)


def load_trace(text):
    """Plan budgets for a trace, within memory too."""
    path = FOLDER / "trace.json"
    path.write_text(text)
    trace = vg.traffic.Trace.load(path)
    for memory in (None, "1GiB"):
        with contextlib.suppress(vg.errors.BudgetError) if memory else contextlib.nullcontext():
            plan = vg.traffic.plan(trace, max_graphs=3, max_memory=memory)
            assert 0 <= plan.cost_per_call < float("inf")
            assert 0 <= plan.padding_share <= 1
    trace.save(path)
    assert vg.traffic.Trace.load(path).calls == trace.calls


FORMATS = {"warmup": (good_warmup(), load_warmup), "trace": (good_trace(), load_trace)}
SEVERAL = FORMATS | {"several": (good_file(), load_warmup)}

EDGES = [
    0, 1, -1, 2**31, 2**63 - 1, 2**63, 10**30, 10**400, 0.0, -0.0, 0.5, 1e-320, 5e-324, 1e15, 1e300, 1e308, float("inf"),
    float("nan"), True, False, None, "", "x", "cpu", [], {}, [[]], [1], {"a": 1}, "9" * 5000,
]  # fmt: skip

anything = st.recursive(
    st.sampled_from(EDGES) | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def mutated(draw, value):
    """A valid value, with something else in a few places."""
    value = deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        inside = value
        while True:
            steps = sorted(inside) if isinstance(inside, dict) else [*range(len(inside))]
            if not steps:
                break
            step = draw(st.sampled_from(steps))
            if isinstance(inside[step], list | dict) and draw(st.integers(0, 5)):
                inside = inside[step]
                continue
            change = draw(st.sampled_from(["other", "other", "other", "drop", "double"]))
            if change == "drop":
                del inside[step]
            elif change == "double" and isinstance(inside, list):
                inside.insert(step, deepcopy(inside[step]))
            else:
                inside[step] = deepcopy(draw(anything))
            break
    return value


@st.composite
def files(draw):
    """A format, and the text of a file: a valid one that was changed or cut, or any JSON."""
    name = draw(st.sampled_from([*SEVERAL]))
    value = draw(st.one_of(mutated(SEVERAL[name][0]), mutated(SEVERAL[name][0]), anything))
    text = json.dumps(value)
    return name, text if draw(st.integers(0, 9)) else text[: draw(st.integers(0, len(text)))]


def read(name, text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what only the file requested and cannot be captured is forgotten with one
        try:
            SEVERAL[name][1](text)
        except vg.errors.InputError as error:
            assert len(str(error)) < 1500  # noqa: PT017 - not every change is damage
            if name != "trace":
                load_warmup(text, "ignore")


@settings(max_examples=30, suppress_health_check=list(HealthCheck), deadline=None)
@given(files())
def test_whatever_is_in_a_file_is_read_or_refused_by_name(case):
    read(*case)


@pytest.mark.parametrize("name", SEVERAL)
def test_a_valid_file_is_read(name):
    good, load = SEVERAL[name]
    load(json.dumps(good))


DAMAGED = {
    "a cost past all floats": lambda good: good["costs"]["replays"][0].__setitem__(-1, 10**400),
    "a cost near the largest float": lambda good: good["costs"]["replays"][0].__setitem__(-1, 1e308),
    "times near the largest float": lambda good: good["costs"].update(per_square=1e308, host=1e308),
    "a cost of nearly nothing": lambda good: good["costs"]["replays"][0].__setitem__(-1, 5e-324),
    "a budget past 64 bits": lambda good: good["costs"]["replays"][0].__setitem__(0, 10**400),
    "a budget of lists": lambda good: good["costs"]["replays"][0].__setitem__(0, [1]),
    "costs of a text": lambda good: good.update(costs="costs"),
    "no costs": lambda good: good["costs"].update(replays=[]),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED.keys())
def test_damage_is_found_when_the_file_is_read(name, damage):
    good, load = FORMATS[name]
    damage(value := deepcopy(good))
    with pytest.raises(vg.errors.InputError, match=r"is not a (trace|warm-up file)"):
        load(json.dumps(value))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", ["[" * 10**5, '{"a":' * 10**5, "9" * 10**4, '"\\ud800', "", "\0"])
def test_what_no_parser_takes_is_refused(name, text):
    with pytest.raises(vg.errors.InputError, match=r"is not a (trace|warm-up file)"):
        FORMATS[name][1](text)


@pytest.mark.parametrize("part", ["calls", "columns"])
@pytest.mark.parametrize(
    "value", [[[[1], 1, 1, 1, 1, 1]], [[{}, 1, 1, 1, 1, 1]], [[10**400] * 6], [[2**63] * 6], "ab", 3]
)
def test_sizes_that_no_call_has_are_refused(part, value):
    with pytest.raises(vg.errors.InputError, match="is not a trace"):
        load_trace(json.dumps(FORMATS["trace"][0] | {part: value}))


def test_costs_that_fall_with_more_rows_are_planned_with():
    value = deepcopy(FORMATS["trace"][0])
    value["costs"]["replays"][1] = [8, 8, 512, 8, 2.0]  # more segments for fewer rows, at a higher cost
    load_trace(json.dumps(value))


def test_timings_by_lists_are_refused():
    entry = ["float32", [4, 2, 8], [4, 2, 8], [[4], 4, None, None], ["a", "b"], "b", 0.5]
    with pytest.raises(vg.errors.InputError, match="is not a warm-up file"):
        load_warmup(json.dumps(FORMATS["warmup"][0] | {"attention": [entry]}))


@pytest.mark.parametrize("place", ["folder", "file/inside", "a\0b", "long" * 2000])
def test_a_path_that_is_no_file_stops_no_start(tmp_path, place):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    path = tmp_path / place
    with pytest.raises(vg.errors.InputError, match="is not a warm-up file"):
        attention_encoder(spec=SHAPED, capture=vg.options.Capture(warmup=path, on_bad_warmup="error"))
    with pytest.warns(UserWarning, match="is not a warm-up file.*It is ignored, and everything is measured again"):
        encoder = attention_encoder(spec=SHAPED, capture=vg.options.Capture(warmup=path))
    assert encoder(rows_for([20]), lengths=[20]).shape == (20, 8)


@pytest.mark.parametrize("scale", ["evil", None, [2.0], {"a": 1}])
def test_what_a_file_alone_requests_and_fails_is_forgotten(tmp_path, scale):
    """Arguments that the module cannot take, in a file that says it is of this encoder."""
    path, value = tmp_path / "warmup.json", deepcopy(FORMATS["warmup"][0])
    ((static_args, _),) = value["used"]
    static_args["scale"] = scale
    path.write_text(json.dumps(value))
    encoder = attention_encoder(spec=SHAPED, capture=vg.options.Capture(warmup=path, lazy=True))
    asked = pytest.warns(UserWarning, match=r"as the warm-up file says, cannot be captured, and is forgotten: ")
    with asked if scale in ("evil", None) else contextlib.nullcontext():  # JSON has no others, so they are left out
        assert encoder.capture_pending(None) == []
    assert encoder.capture_pending(None) == []
    assert "nothing could be captured" not in encoder.report()
    encoder(rows_for([20]), lengths=[20])
    assert encoder.capture_pending(None)
    encoder(rows_for([20]), lengths=[20])
    assert encoder.stats.replays.total() == 1
