"""Modules that keep something between calls: a first call leaves what a plain call leaves, and no output is silently wrong.

Each module of `corpus/` is called by an encoder, and by a plain copy of it, which has classes and globals of its own.
"""

import functools
from dataclasses import dataclass, field

import pytest

import varlen_graphs as vg
from tests.state.copies import Copy, call, chance, load, names
from tests.support.segments import relative

SHORT_FIRST = [[5], [5], [40, 30], [150], [3, 20, 9], [7], [60], [5], [200], [12, 100], [6], [5]]
LONG_FIRST = [[150], [3, 20, 9], [5], [5], [40, 30], [200], [7], [2, 2], [150], [64], [5]]

STARTS = {"cold": SHORT_FIRST, "captured": LONG_FIRST, "used before": LONG_FIRST}
"""What an encoder begins with, and the lengths of the items of its calls: its first call captures, `capture()` does, or
its first call does after the module itself was called."""

MODULES = [pytest.param(*case, id="-".join(case)) for case in names()]

CASES = [
    pytest.param(*case, start, id="-".join((*case, start)))
    for case in names()
    for start in STARTS
    if start != "used before" or case[0] in ("initialised", "code")
]


@dataclass
class Run:
    """What came of the calls of one encoder.

    Attributes:
        after_capture: How what the module keeps differs from what it kept before, after `capture()`.
        after_first: How what the module keeps after the first call differs from what a plain call leaves.
        wrong: The calls whose output was not that of the plain copy; the first of them ends the run.
        refused: The first error of the library.
        replays: The number of replays.
    """

    after_capture: list[str] = field(default_factory=list)
    after_first: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    refused: str = ""
    replays: int = 0


@functools.cache
def run(file, name, start):
    """Make the calls of a new encoder, and of a plain copy of its module."""
    copy, plain, done = Copy(file, name), Copy(file, name), Run()
    if start == "used before":
        call(copy, 100, [20]), call(plain, 100, [20])
    encoder = copy.encoder()
    if start == "captured":
        before = chance()
        try:
            encoder.capture()
        except vg.errors.VarlenGraphsError:
            pass  # refused
        except Exception as error:
            done.wrong.append(f"capture raised {error!r}")
        done.after_capture = copy.differences(plain) + copy.differences_of_code(plain) + copy.chances(before)
    for number, lengths in enumerate(STARTS[start]):
        replays = encoder.stats.replays.total()
        try:
            got = call(lambda x, n: encoder(x, lengths=n), number, lengths)
        except vg.errors.VarlenGraphsError as error:
            got, done.refused = None, done.refused or f"call {number}, of {lengths}: {error}"
            if copy.module.opaque or encoder.stats.replays:
                return done  # refused, and it is not known whether the module ran
        except Exception as error:
            done.wrong.append(f"call {number}, of {lengths}, raised {error!r}")
            return done
        left, done.replays = chance(), encoder.stats.replays.total()
        if got is not None or copy.differences(plain):
            expected = call(plain, number, lengths)
        if number == 0:
            done.after_first = copy.differences(plain) + copy.differences_of_code(plain) + copy.chances(left)
        if got is None or copy.module.draws:
            continue
        if encoder.stats.replays.total() == replays and (copy.module.beyond_reach or copy.module.opaque):
            return done  # it is not replayed, and what runs on copies of it wrote where no copy reaches is not undone
        if got.shape != expected.shape or relative(got, expected) > 1e-5:
            done.wrong.append(f"call {number}, of {lengths}, after {encoder.stats.replays.total()} replays")
            return done
    return done


@pytest.mark.filterwarnings("ignore::UserWarning")  # what is kept is warned of
@pytest.mark.parametrize(("file", "name", "start"), [case for case in CASES if case.values[2] != "captured"])
def test_after_the_first_call_a_module_keeps_what_a_plain_call_leaves(file, name, start):
    """If the call is refused: what a plain call leaves, or what there was before."""
    assert not run(file, name, start).after_first


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("file", "name"), MODULES)
def test_a_capture_ahead_of_traffic_leaves_a_module_alone(file, name):
    assert not run(file, name, "captured").after_capture


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("file", "name", "start"), CASES)
def test_no_output_is_silently_wrong(file, name, start):
    assert not run(file, name, start).wrong


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("file", "name"), [case for case in MODULES if getattr(load(case.values[0]), case.values[1]).harmless]
)
def test_what_a_graph_can_hold_is_graphed(file, name):
    """What its first call makes ready, too: that call is the caller's own."""
    done = run(file, name, "cold")
    assert not done.refused
    assert done.replays >= 10
