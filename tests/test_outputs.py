import gc
import re
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

import varlen_graphs as vg
from varlen_graphs.extents import Items, Rows
from varlen_graphs.outputs import extents, flatten
from varlen_graphs.packing import Span


@dataclass
class Result:
    states: torch.Tensor
    count: int
    extra: list


Pair = namedtuple("Pair", ["first", "second"])

a, b, c = torch.zeros(4, 1), torch.ones(2, 1), torch.full((8,), 2.0)
ROWS, HALF = vg.Rows(), vg.Rows(every=2)


@pytest.mark.parametrize(
    ("output", "declared", "kinds"),
    [
        (a, ROWS, [ROWS]),
        ((a, [b, b]), (ROWS, HALF), [ROWS, HALF, HALF]),
        ([a, b], [ROWS, HALF], [ROWS, HALF]),
        (Pair(a, b), (ROWS, HALF), [ROWS, HALF]),
        ({"x": a, "y": None}, ROWS, [ROWS]),
        (OrderedDict(x=a, y=b), vg.Outputs(x=ROWS, y=HALF), [ROWS, HALF]),
        ({"x": a, "y": (b,)}, vg.Outputs(x=ROWS, y=HALF), [ROWS, HALF]),
        (Result(a, 3, [b, c]), vg.Outputs(states=ROWS, extra=(HALF, vg.Items(2))), [ROWS, HALF, vg.Items(2)]),
        (
            BaseModelOutputWithPooling(last_hidden_state=a, pooler_output=b),
            vg.Outputs(last_hidden_state=ROWS, pooler_output=HALF),
            [ROWS, HALF],
        ),
    ],
)
def test_outputs_are_taken_apart_and_put_together_anew(output, declared, kinds):
    parts = flatten(output, declared)
    assert parts.extents == kinds
    fresh = [tensor + 5 for tensor in parts.tensors]
    again = parts.rebuild(fresh)
    assert type(again) is type(output)
    assert again is not output
    assert all(x is y for x, y in zip(flatten(again, declared).tensors, fresh, strict=True))
    if isinstance(output, Result):
        assert again.count == 3


@pytest.mark.parametrize(
    ("output", "declared", "message"),
    [
        (
            a,
            (ROWS,),
            "output is a tensor but is declared as (Rows(every=1, rows_dim=0),): expected Rows(...), Items(...) or",
        ),
        ((a, b), (ROWS,), "output has 2 parts but is declared as (Rows(every=1, rows_dim=0),)"),
        ((a, b), vg.Outputs(x=ROWS), "output has 2 parts but is declared as Outputs(x=Rows(every=1, rows_dim=0))"),
        (
            {"x": a},
            (ROWS,),
            "output has fields ['x'] but is declared as (Rows(every=1, rows_dim=0),): expected Outputs(...)",
        ),
        ({"x": a, "y": b}, vg.Outputs(x=ROWS), "not Python values but not declared: ['y']"),
        ({"x": a}, vg.Outputs(x=ROWS, z=ROWS), "declared but absent: ['z']"),
        ({"x": a, "y": Result(a, 3, [])}, vg.Outputs(x=ROWS), "not declared: ['y']"),
        (
            {"x": a, "y": object()},
            ROWS,
            "output.y is a object, which may hide tensors: expected tensors, Python values",
        ),
        (
            ({"x": a},),
            (vg.Outputs(x=(ROWS,)),),
            "output[0].x is a tensor but is declared as (Rows(every=1, rows_dim=0),)",
        ),
    ],
)
def test_declarations_that_do_not_match_name_the_part(output, declared, message):
    with pytest.raises(vg.SpecError, match=re.escape(message)):
        flatten(output, declared)


def test_nothing_keeps_the_tensors_of_an_output_alive():
    """Not even until the garbage collector runs: they are in the memory that the next capture is to use again."""
    gc.disable()
    try:
        output = Result(torch.ones(2), 3, [torch.ones(1)])
        watched = [weakref.ref(output.states), weakref.ref(output.extra[0])]
        rebuild = flatten(output, vg.Outputs(states=ROWS, extra=HALF)).rebuild
        del output
        assert [reference() for reference in watched] == [None, None]
        assert rebuild([a, b]).count == 3
    finally:
        gc.enable()


def test_extents_of_a_declaration():
    assert extents(vg.Outputs(x=(ROWS, HALF), y=Items(3))) == [ROWS, HALF, Items(3)]


def test_places_follow_rows_or_items():
    span = Span(row=8, rows=4, item=1, items=2)
    assert Rows(every=4).place(span) == (slice(2, 3),)
    assert Items(rows=3).place(span) == (slice(3, 9),)


@pytest.mark.parametrize("make", [lambda: vg.Rows(every=0), lambda: vg.Items(rows=0)])
def test_ratios_below_one_are_refused(make):
    with pytest.raises(vg.SpecError, match="expected an integer of at least 1"):
        make()
