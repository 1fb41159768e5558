"""`outputs.Rows`, `Items` and `Fields`: what outputs may be, and how they are declared."""

import gc
import re
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from transformers import BatchFeature
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import ModelOutput

import varlen_graphs as vg
from tests.support.encoders import attention_encoder
from varlen_graphs.layouts.item_slice import ItemSlice
from varlen_graphs.outputs.declared import extents
from varlen_graphs.outputs.entries import Items, Rows
from varlen_graphs.outputs.parts import flatten


@dataclass
class Result:
    states: torch.Tensor
    count: int
    extra: list


Pair = namedtuple("Pair", ["first", "second"])

a, b, c = torch.zeros(4, 1), torch.ones(2, 1), torch.full((8,), 2.0)
ROWS, HALF = vg.outputs.Rows(), vg.outputs.Rows(every=2)


@pytest.mark.parametrize(
    ("output", "declared", "kinds"),
    [
        (a, ROWS, [ROWS]),
        ((a, [b, b]), (ROWS, HALF), [ROWS, HALF, HALF]),
        ([a, b], [ROWS, HALF], [ROWS, HALF]),
        (Pair(a, b), (ROWS, HALF), [ROWS, HALF]),
        ({"x": a, "y": None}, ROWS, [ROWS]),
        (OrderedDict(x=a, y=b), vg.outputs.Fields(x=ROWS, y=HALF), [ROWS, HALF]),
        ({"x": a, "y": (b,)}, vg.outputs.Fields(x=ROWS, y=HALF), [ROWS, HALF]),
        ({"x": a, "y": (b,)}, {"x": ROWS, "y": HALF}, [ROWS, HALF]),
        (
            Result(a, 3, [b, c]),
            vg.outputs.Fields(states=ROWS, extra=(HALF, vg.outputs.Items(2))),
            [ROWS, HALF, vg.outputs.Items(2)],
        ),
        (
            BaseModelOutputWithPooling(last_hidden_state=a, pooler_output=b),
            vg.outputs.Fields(last_hidden_state=ROWS, pooler_output=HALF),
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
            "output is a tensor but is declared as (Rows(every=1, rows_dim=0, prefix=None),): expected Rows(...), Items(...) or",
        ),
        ((a, b), (ROWS,), "output has 2 parts but is declared as (Rows(every=1, rows_dim=0, prefix=None),)"),
        (
            (a, b),
            vg.outputs.Fields(x=ROWS),
            "output has 2 parts but is declared as Fields(x=Rows(every=1, rows_dim=0, prefix=None))",
        ),
        (
            {"x": a},
            (ROWS,),
            "output has fields ['x'] but is declared as (Rows(every=1, rows_dim=0, prefix=None),): expected Fields(...)",
        ),
        ({"x": a, "y": b}, vg.outputs.Fields(x=ROWS), "undeclared: ['y']"),
        ({"x": a}, vg.outputs.Fields(x=ROWS, z=ROWS), "declared but absent: ['z']"),
        ({"x": a}, {"x": ROWS, 3: ROWS}, "declared but absent: [3]"),
        (
            (a, b),
            {0: ROWS, 1: HALF},
            "output has 2 parts but is declared as {0: Rows(every=1, rows_dim=0, prefix=None), 1: Rows",
        ),
        ({"x": a, "y": Result(a, 3, [])}, vg.outputs.Fields(x=ROWS), "undeclared: ['y']"),
        (
            {"x": a, "y": object()},
            ROWS,
            "output.y has type object, which may hide tensors: expected tensors, Python values",
        ),
        (
            ({"x": a},),
            (vg.outputs.Fields(x=(ROWS,)),),
            "output[0].x is a tensor but is declared as (Rows(every=1, rows_dim=0, prefix=None),)",
        ),
    ],
)
def test_declarations_that_do_not_match_name_the_part(output, declared, message):
    with pytest.raises(vg.errors.SpecError, match=re.escape(message)):
        flatten(output, declared)


@dataclass
class Doubling:
    states: torch.Tensor

    def __post_init__(self):
        self.states = self.states * 2


@dataclass(frozen=True, slots=True)
class Frozen:
    states: torch.Tensor
    name: str = "states"

    def __post_init__(self):
        object.__setattr__(self, "states", self.states + 1)


@dataclass
class Later:
    states: torch.Tensor
    more: torch.Tensor | None = field(init=False, default=None)
    unset: torch.Tensor = field(init=False)


@dataclass
class States(ModelOutput):
    states: torch.Tensor = None
    more: torch.Tensor = None
    other: torch.Tensor = None


class OwnDict(dict):
    pass


class OwnList(list):
    pass


class DoublingDict(dict):
    def __init__(self, entries):
        super().__init__({name: value * 2 for name, value in entries.items()})


class DoublingList(list):
    def __init__(self, entries):
        super().__init__(entry * 2 for entry in entries)


@dataclass
class KeyedDict(dict):
    states: torch.Tensor


def with_attributes(output, **attributes):
    for name, value in attributes.items():
        setattr(output, name, value)
    return output


def with_entry(output, key, value):
    output[key] = value
    return output


def encoder_that_makes(make, outputs=ROWS):
    """An encoder of a module that makes its output of the sum of its rows and 1."""

    class Making(torch.nn.Module):
        def forward(self, x):
            return make(x + 1)

    return attention_encoder(module=Making(), spec=vg.BufferSpec("x", vg.Lengths(), outputs=outputs))


def parts_of(output):
    entries = dict(output.items()) if hasattr(output, "items") else {}
    entries |= dict(enumerate(output)) if isinstance(output, tuple | list) else {}
    names = [n for n in ("states", "more", "other", "unset", "name", "data") if hasattr(output, n)]
    return {("entry", key): value for key, value in entries.items()} | {n: getattr(output, n) for n in names}


@pytest.mark.parametrize(
    "make",
    [
        Doubling,
        Frozen,
        Later,
        lambda y: with_attributes(Later(y), more=y * 3),
        lambda y: with_attributes(Doubling(y), more=y * 3, name="doubled"),
        lambda y: States(y, more=y * 2),
        lambda y: States(more=y),
        lambda y: States({"more": y, "states": y * 2}),
        lambda y: with_attributes(States(y), more=y * 2),
        lambda y: with_attributes(States(y, other=y * 2), more=y * 3, data=y * 4),
        lambda y: with_entry(States(y), "more", y * 2),
        lambda y: with_entry(States(y), "data", y * 2),
        lambda y: with_entry(States(y), "more", None),
        lambda y: KeyedDict(y),
        lambda y: OwnDict(states=y),
        lambda y: OwnList([y, y * 2]),
        lambda y: OrderedDict(more=y, states=y * 2),
        lambda y: BatchFeature({"states": y, "more": 3}),
        lambda y: Pair(y, y * 2),
        lambda y: y.topk(2),
        lambda y: [Doubling(y), {"states": Doubling(y)}],
        lambda y: {0: y, 1: [y * 2], "self": y * 3},
        lambda y: {None: y, ("states", 3): {-1: y * 2, torch.float32: 3}},
    ],
)
def test_outputs_of_replays_hold_what_those_of_the_module_hold(make):
    encoder, rows = encoder_that_makes(make), torch.randn(12, 8)
    came, expected = encoder(rows, lengths=[5, 7]), encoder.module(rows)
    assert encoder.stats.replays.total() == 1
    assert type(came) is type(expected)
    check = [(parts_of(came), parts_of(expected))]
    while check:
        one, other = check.pop()
        assert list(one) == list(other)
        for left, right in zip(one.values(), other.values(), strict=True):
            if isinstance(right, torch.Tensor):
                assert torch.equal(left, right)
            elif right is None or isinstance(right, int | str):
                assert left == right
            else:
                check.append((parts_of(left), parts_of(right)))
    encoder.release()
    assert encoder.verify([{"x": rows, "lengths": [5, 7]}])


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda y: with_attributes(OwnDict(states=y), more=y * 2), "OwnDict with attributes ['more']"),
        (lambda y: with_attributes(OwnDict(states=y), more=3), "OwnDict with attributes ['more']"),
        (lambda y: with_attributes(OwnList([y]), more=y * 2), "OwnList with attributes ['more']"),
        (lambda y: with_attributes(OrderedDict(states=y), more=y * 2), "OrderedDict with attributes ['more']"),
        (lambda y: with_entry(KeyedDict(y), "more", y * 2), "KeyedDict with attributes ['states']"),
        (lambda y: DoublingDict({"states": y}), "DoublingDict with attributes []"),
        (lambda y: DoublingList([y]), "DoublingList with attributes []"),
        (lambda y: defaultdict(list, states=y), "defaultdict with attributes []"),
    ],
)
def test_outputs_that_cannot_be_made_anew_are_refused(make, name):
    encoder = encoder_that_makes(lambda y: (y, make(y)))
    with pytest.raises(
        vg.errors.SpecError, match=re.escape(f"output[1] is a {name}, which cannot be rebuilt from its parts")
    ):
        encoder(torch.randn(12, 8), lengths=[5, 7])


def test_tensors_beside_the_fields_of_a_dataclass_are_declared_by_their_names():
    def make(y):
        return with_attributes(States(y), pooled=y.unflatten(0, (-1, 2)).sum(1))

    encoder, rows = encoder_that_makes(make, vg.outputs.Fields(states=ROWS, pooled=HALF)), torch.randn(12, 8)
    assert torch.equal(encoder(rows, lengths=[4, 8]).pooled, encoder.module(rows).pooled)
    with pytest.raises(vg.errors.SpecError, match=re.escape("undeclared: ['pooled']")):
        encoder_that_makes(make, vg.outputs.Fields(states=ROWS))(rows, lengths=[4, 8])


class Keyed(torch.nn.Module):
    def forward(self, x):
        return {"self": x, 3: 4}


def test_a_declaration_may_name_self_and_keys_without_one_may_hold_python_values():
    outputs = vg.outputs.Fields(self=ROWS)
    packed = attention_encoder(module=Keyed(), spec=vg.BufferSpec("x", vg.Lengths(), outputs=outputs))
    assert packed(torch.ones(5, 8), lengths=[2, 3])["self"].shape == (5, 8)
    spec = vg.BufferSpec("x", vg.Lengths(padded=True), outputs=outputs)
    padded = vg.GraphedEncoder(Keyed(), vg.budgets.PaddedLadder(4, 32), spec, backend="tape")
    assert padded(torch.ones(2, 3, 8), lengths=[2, 3])["self"].sum() == 5 * 8
    with pytest.raises(vg.errors.SpecError, match=re.escape("output has fields ['self', 3]; undeclared: [3]")):
        encoder_that_makes(lambda y: {"self": y, 3: [y]}, outputs)(torch.randn(2, 8), lengths=[2])


def test_a_dict_declares_outputs_by_their_keys():
    def make(y):
        return {0: y, "half": States(y.unflatten(0, (-1, 2)).sum(1))}

    encoder, rows = encoder_that_makes(make, {0: ROWS, "half": {"states": HALF}}), torch.randn(12, 8)
    came, expected = encoder(rows, lengths=[4, 8]), encoder.module(rows)
    assert torch.equal(came[0], expected[0])
    assert torch.equal(came["half"].states, expected["half"].states)
    with pytest.raises(vg.errors.LayoutError, match=re.escape("lengths[0] has 5 rows: expected a multiple of 2")):
        encoder(rows, lengths=[5, 7])

    spec = vg.BufferSpec("x", vg.Lengths(padded=True), outputs={"self": ROWS})
    padded = vg.GraphedEncoder(Keyed(), vg.budgets.PaddedLadder(4, 32), spec, backend="tape")
    assert padded(torch.ones(2, 3, 8), lengths=[2, 3])["self"].sum() == 5 * 8


def test_nothing_keeps_the_tensors_of_an_output_alive():
    """Not even until the garbage collector runs: they are in the memory that the next capture is to use again."""
    gc.disable()
    try:
        output = Result(torch.ones(2), 3, [torch.ones(1)])
        watched = [weakref.ref(output.states), weakref.ref(output.extra[0])]
        rebuild = flatten(output, vg.outputs.Fields(states=ROWS, extra=HALF)).rebuild
        del output
        assert [reference() for reference in watched] == [None, None]
        assert rebuild([a, b]).count == 3
    finally:
        gc.enable()


def test_extents_of_a_declaration():
    assert extents(vg.outputs.Fields(x=(ROWS, HALF), y=Items(3))) == [ROWS, HALF, Items(3)]


def test_places_follow_rows_or_items():
    span = ItemSlice(row=8, rows=4, item=1, items=2)
    assert Rows(every=4).place(span) == (slice(2, 3),)
    assert Items(rows=3).place(span) == (slice(3, 9),)


@pytest.mark.parametrize("make", [lambda: vg.outputs.Rows(every=0), lambda: vg.outputs.Items(rows=0)])
def test_ratios_below_one_are_refused(make):
    with pytest.raises(vg.errors.SpecError, match="expected an integer of at least 1"):
        make()


class Shares(torch.nn.Module):
    """Returns views of its rows and of a weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x, cu_seqlens):
        return x + cu_seqlens[0], x[:, :2], self.weight.expand(len(x), -1)


def test_outputs_share_no_memory_with_rows_and_weights():
    spec = vg.BufferSpec("x", vg.Lengths("lengths"), [vg.buffers.CuSeqlens()], [vg.outputs.Rows()] * 3)
    module = Shares().eval()
    encoder = vg.GraphedEncoder(module, [8], spec, backend="tape")
    x = torch.randn(5, 4)
    for _ in range(2):
        _, part, weights = encoder(x, lengths=[2, 3])
        assert torch.equal(part, x[:, :2])
        part.zero_()
        assert x[:, :2].all()
        module.weight.add_(1)
        assert (weights + 1 == module.weight).all()
