"""`Stats`: counters for programs, as a dict, and as the text that Prometheus scrapes, which is parsed here by its grammar."""

import json
import re
import signal
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support.encoders import attention_encoder, rows_for
from tests.support.forked_scripts import run_script
from tests.support.threads import run_in_threads

BUDGETS = st.builds(vg.budgets.Budget, st.integers(1, 4096), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
LABEL_NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: name not in ("reason", "rows", "items", "segments", "max_seqlen", "prefix", "self")
)
SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (-?[0-9.e+]+)")
PAIR = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"')
ESCAPED = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def parse(text):
    """Samples by name and labels; strict about everything that the format says of text without timestamps."""
    assert text.endswith("\n")
    found, current, helped = {}, None, set()
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# HELP "):
            _, _, current, _ = line.split(" ", 3)
            assert current not in helped  # one HELP and one TYPE a name, and all of its samples after them
            helped.add(current)
        elif line.startswith("# TYPE "):
            assert line == f"# TYPE {current} counter"
            assert current.endswith("_total")
        else:
            name, labels, value = SAMPLE.fullmatch(line).groups()
            assert name == current
            pairs, rest = [], labels or ""
            while rest:
                pair = PAIR.match(rest)
                pairs.append((pair[1], re.sub(r"\\.", lambda one: ESCAPED[one[0]], pair[2])))
                rest = rest[pair.end() :]
                assert rest == "" or (rest[0] == "," and len(rest) > 1)
                rest = rest[1:]
            key = name, frozenset(pairs)
            assert len(dict(pairs)) == len(pairs)
            assert key not in found
            found[key] = float(value)
    return found


@given(
    st.lists(st.tuples(BUDGETS, st.integers(0, 4096), st.booleans()), max_size=6),
    st.lists(st.text(max_size=8), max_size=4),
    st.dictionaries(LABEL_NAMES, st.text(max_size=8), max_size=3),
)
def test_all_that_was_counted_is_in_the_dict_and_on_the_page(replays, reasons, labels):
    stats = vg.stats.Stats()
    for budget, active, right in replays:
        stats.count_call(2)
        stats.count_replay(budget, min(active, budget.rows))
        stats.count_check(budget, right, "the module itself")
        stats.count_wrong_layouts(2)
        stats.count_exact(budget, 3)
        stats.count_capture_failure("no room")
    for reason in reasons:
        stats.count_eager(reason)
    now = json.loads(json.dumps(stats.as_dict()))
    assert now["eager"] == stats.eager
    assert sum(each["padding"] for each in now["budgets"]) == now["padding"] == stats.padding
    found = parse(stats.prometheus("own", **labels))
    everywhere = frozenset(labels.items())
    for name in ("calls", "items", "rows", "padding", "wrong_layouts", "capture_failures"):
        assert found.pop((f"own_{name}_total", everywhere)) == now[name]
    for reason, count in stats.eager.items():
        assert found.pop(("own_eager_total", everywhere | {("reason", reason)})) == count
    for against, count in stats.against.items():
        assert found.pop(("own_checked_total", everywhere | {("against", against)})) == count
    for each in now["budgets"]:
        own = {(name, str(each[name])) for name in ("rows", "items", "segments", "max_seqlen")}
        for name in ("replays", "active", "padding", "checked", "wrong", "evicted", "exact"):
            assert found.pop((f"own_budget_{name}_total", everywhere | own)) == each[name]
    assert not found


def test_what_an_encoder_did_is_on_its_page():
    encoder = attention_encoder()
    for lengths in ([20], [300]):
        encoder(rows_for(lengths), lengths=lengths)
    found = parse(encoder.stats.prometheus(model='a "tower"'))
    model = ("model", 'a "tower"')
    assert found["varlen_graphs_calls_total", frozenset([model])] == 2
    assert found["varlen_graphs_eager_total", frozenset([model, ("reason", "larger than every budget")])] == 1
    assert encoder.stats.as_dict()["budgets"] == [
        {"rows": 64, "items": 4, "segments": 8, "max_seqlen": 64, "replays": 1, "active": 20, "padding": 44}
        | {"checked": 1, "wrong": 0, "evicted": 0, "exact": 0}
    ]


@pytest.mark.parametrize(
    ("prefix", "labels"),
    [("", {}), ("1st", {}), ("a-b", {}), ("a", {"1st": 1}), ("a", {"__own": 1}), ("a", {"b-c": 1}), ("a", {"rows": 1})],
)
def test_names_that_prometheus_does_not_take_are_refused(prefix, labels):
    stats = vg.stats.Stats()
    stats.count_replay(vg.budgets.Budget(8), 8)
    with pytest.raises(vg.errors.InputError, match=r"prefix|label"):
        stats.prometheus(prefix, **labels)


@pytest.mark.parametrize("label", ["reason", "rows", "items", "segments", "max_seqlen"])
def test_labels_of_the_counters_are_refused_before_anything_was_counted(label):
    with pytest.raises(vg.errors.InputError, match=f"label '{label}' is a label of the metrics themselves"):
        vg.stats.Stats().prometheus(**{label: "x"})


def test_numbers_of_one_moment_agree_while_threads_count():
    stats, wrong = vg.stats.Stats(), []

    def work(number):
        for _ in range(200):
            if number:
                stats.count_replay(vg.budgets.Budget(16), number)
            else:
                now = stats.as_dict()
                replays = sum(each["replays"] for each in now["budgets"])
                wrong.extend([now] if now["rows"] + now["padding"] != 16 * replays else [])

    run_in_threads(work)
    assert not wrong


class Interrupting(str):
    """Text that runs Python when it is counted, as a signal handler or a finaliser may."""

    def __hash__(self):
        self.seen = encoder_of_reasons.stats.as_dict()
        return super().__hash__()


encoder_of_reasons = attention_encoder(eager_if=lambda module: Interrupting("content pruning"))


def test_counters_may_be_read_while_they_are_being_counted():
    """In the same thread, which waits for no lock of its own."""
    thread = threading.Thread(target=encoder_of_reasons, args=(rows_for([5]),), kwargs={"lengths": [5]}, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert encoder_of_reasons.stats.eager == {"content pruning": 1}


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers of signals")
def test_a_signal_handler_may_read_the_counters_at_any_time():
    printed, _ = run_script("""
    import signal
    encoder, read = attention_encoder(spec=spec, capture=vg.options.Capture(lazy=True)), []

    def handler(*args):
        read.append(encoder.stats.as_dict()["calls"])

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    with encoder.record() as trace:
        while len(read) < 500:
            encoder(rows, lengths=[6])
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert read == sorted(read)
    print("whole")
    """)
    assert printed == ["whole"]
