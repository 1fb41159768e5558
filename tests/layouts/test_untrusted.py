"""Layouts come from users' requests: none allocates without bound, is taken for another, or spoils a later call."""

import sys
import time

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import attention_encoder, attention_spec
from tests.support.memory import memory_limit
from tests.support.untrusted import LAYOUTS, NEARLY, attack, attacks, device_attacks, target


@pytest.mark.parametrize("as_what", [list, torch.tensor, lambda layout: torch.tensor(layout).numpy()])
@pytest.mark.parametrize(("name", "layout"), NEARLY.values(), ids=NEARLY.keys())
def test_rows_are_counted_with_care(name, layout, as_what):
    attack(name, {"layout": as_what(layout)})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of an array of tensors
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(attacks())
def test_whatever_comes_as_a_layout_is_refused_by_name_and_forgotten(case):
    attack(*case)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(device_attacks())
def test_whatever_a_layout_on_the_device_says_is_found_there(case):
    """On the tape any tensor is on the device: the check inside the graph sees it, and the host does not."""
    name, arguments = case
    stats = target(name, "cpu").encoder.stats
    calls = stats.calls
    attack(name, arguments)
    assert stats.calls == calls + 3  # one that the host refuses is not counted


def deep(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


ODD = {
    "an integer of 5000 digits": lambda: [(1, 10**5000, 1)],
    "a hundred thousand levels": lambda: [deep(10**5)],
    "a size that is as deep": lambda: [(1, deep(10**5), 1)],
    "a list of itself": lambda: (value := [], value.append(value))[0],
    "a megabyte of text": lambda: "1" * 10**6,
    "a quantised tensor": lambda: torch.quantize_per_tensor(torch.ones(2, 3), 1, 0, torch.quint8),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(n, dtype=torch.int64) for n in (2, 3)]),
    "a class": lambda: int,
    "a generator": lambda: (n for n in (5, 7)),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", ODD.values(), ids=ODD.keys())
@pytest.mark.parametrize("name", LAYOUTS)
def test_odd_objects_are_refused_too(name, make):
    for argument in LAYOUTS[name][1]:
        attack(name, {argument: make()})


MANY = 10**5

HUGE = {
    "grid": [[(1, 2**31, 2**31)], [(2**62, 2, 2)], [(2**63 - 1,) * 3], [(1, 2, 2)] * MANY],
    "sizes": [[(2**31, 2**31)], [(2**63 - 1, 1)], [(1, 1)] * MANY],
    "lengths": [[2**40], [2**63 - 1], [2**62] * 4, [1] * MANY],
    "padded_lengths": [[2**40, 5], [2**63 - 1] * 2, [1] * MANY],
    "mask": [[[1]] * MANY, [[1] * MANY]],
}


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.parametrize("name", HUGE)
def test_a_layout_of_any_size_takes_memory_and_time_for_what_came_only(name):
    attacked = target(name, "cpu")
    others = [HUGE[name][-1], *(torch.tensor(value) for value in HUGE[name])]
    for value in [*HUGE[name], *others]:
        start = time.monotonic()
        with memory_limit(2**29):
            attack(name, {"layout": value})
            with pytest.raises(vg.errors.VarlenGraphsError):
                attacked.encoder.eager(attacked.rows, **attacked.good | {"layout": value})
        assert time.monotonic() - start < 20


EXPANDED = {
    "grid": (10**9, 3),
    "sizes": (10**9, 2),
    "lengths": (10**10,),
    "padded_lengths": (10**10,),
    "mask": (10**5, 10**5),
}
"""Shapes of tensors that have memory for one number."""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.parametrize("make", [torch.ones, numpy.ones], ids=["tensor", "array"])
@pytest.mark.parametrize("name", EXPANDED)
def test_a_tensor_that_says_to_hold_more_than_it_does_is_refused_unread(name, make):
    one, shape = make(1), EXPANDED[name]
    layout = one.to(torch.int8).expand(shape) if make is torch.ones else numpy.broadcast_to(one.astype("int8"), shape)
    attacked = target(name, "cpu")
    with memory_limit(2**28):
        attack(name, {"layout": layout})
        with pytest.raises(vg.errors.LayoutError, match=r"numbers, which cannot describe the items of \d+ rows"):
            attacked.encoder(attacked.rows, **attacked.good | {"layout": layout})


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_columns_and_stages_are_no_longer_than_their_rows():
    encoder = vg.GraphedEncoder(
        nn.Linear(8, 8),
        [64],
        vg.BufferSpec(vg.inputs.Rows("input", (8,)), vg.Lengths(columns=[vg.layouts.Column("kind")])),
        backend="tape",
    )
    many = torch.ones(1, dtype=torch.int64).expand(10**10)
    with memory_limit(2**28):
        with pytest.raises(vg.errors.LayoutError, match="kind holds 10000000000 numbers"):
            encoder(torch.ones(5, 8), lengths=[5], kind=many)
        with (
            pytest.raises(vg.errors.LayoutError, match="lengths holds 10000000000 numbers"),
            encoder.stage(many, kind=[1]),
        ):
            pass


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.parametrize("backend", ["tape", "eager"])
def test_a_stage_is_no_larger_than_the_largest_budget(backend):
    spec = attention_spec(rows=vg.inputs.Rows("x", (8,)))
    encoder = attention_encoder(spec=spec, backend=backend)
    for layout in ([2**40], [2**62], [1] * MANY):
        with memory_limit(2**29), pytest.raises(vg.errors.BudgetError, match="no budget holds"), encoder.stage(layout):
            pass
    with encoder.stage([5]) as stage:
        stage.rows.fill_(1)
    assert stage.output.shape == (5, 8)


def test_no_function_of_the_users_sees_items_that_did_not_come():
    def longest(call):
        assert call.total == 4
        return [max(call.rows)] * len(call)

    spec = attention_spec(layout=vg.Lengths(columns=(vg.layouts.Column("longest", function=longest),)))
    encoder = attention_encoder(spec=spec)
    for lengths in ([2**40], [1] * 9, torch.tensor([2**62])):
        with pytest.raises(vg.errors.LayoutError, match="but x has 4 rows"):
            encoder(torch.zeros(4, 8), lengths=lengths)
    assert encoder(torch.zeros(4, 8), lengths=[3, 1]).shape == (4, 8)
