"""Static arguments: what may be the key of graphs, and what is told apart."""

import enum
import math
import warnings
from dataclasses import InitVar, dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import UNVERIFIED, encoder_of, rows_for
from tests.support.towers import distance
from varlen_graphs.declaration.static_args import ChangeableError, json_static_args, static_key
from varlen_graphs.graphs.store import MOST_SETS, TOO_MANY_SETS


class Kind(enum.Enum):
    ADD = "add"
    LEAVE = "leave"


class Flags(enum.Flag):
    ONE = enum.auto()
    TWO = enum.auto()


class Name(str):
    """Equal to its text, and of another type."""


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Setting:
    scale: Any
    shift: Any = field(default=0.0, compare=False)


APART = [
    0, 0.0, -0.0, False, 1, 1.0, True, "1", b"1", 1 + 0j, complex(1, -0.0), None, ..., math.nan, math.inf, Decimal(1), Fraction(1),
    Name("1"), Path("1"), range(1), numpy.float32(1), numpy.float64(1), numpy.int64(1), torch.float32, torch.device("cpu"), int,
    torch.relu, distance, math, Kind.ADD, Kind.LEAVE, Flags.ONE, Flags.ONE | Flags.TWO, (), (1,), (1.0,), ((1,),), Pair(1, 2),
    (1, 2), (0.0,), (-0.0,), torch.Size([1, 2]), frozenset(), frozenset({1}), frozenset({1.0}), Setting(1), Setting(1.0),
    Setting(1, 1), Setting(1, (1,)), Setting(math.nan),
]  # fmt: skip


def test_values_that_are_not_alike_have_keys_of_their_own():
    assert len({static_key({"by": value}) for value in APART}) == len(APART)


@pytest.mark.parametrize("make", [lambda: float("nan"), lambda: (float("nan"), 1), lambda: Setting(float("nan"), 2)])
def test_nan_is_one_value(make):
    assert static_key({"by": make()}) == static_key({"by": make()})


@dataclass(frozen=True)
class Derived:
    """Has an attribute that is no field."""

    kind: int
    scale: InitVar[float] = 1.0

    def __post_init__(self, scale):
        object.__setattr__(self, "factor", scale)


class Labelled(Setting):
    def __init__(self, scale, label):
        super().__init__(scale)
        object.__setattr__(self, "label", label)


@pytest.mark.parametrize("value", [Derived(1, 2.0), Labelled(1, "a")], ids=["of an InitVar", "of a subclass"])
def test_a_frozen_dataclass_with_more_attributes_than_fields_is_refused(value):
    with pytest.raises(ChangeableError):
        static_key({"by": value})


def test_json_preserves_numbers_texts_and_none():
    static_args = {"a": 1, "b": 1.5, "c": True, "d": None, "e": "text", "f": -0.0}
    got = json_static_args(static_key(static_args))
    assert {name: repr(value) for name, value in got.items()} == {
        name: repr(value) for name, value in static_args.items()
    }
    assert all(
        json_static_args(static_key({"by": value})) is None for value in ((), (1,), math.nan, Kind.ADD, Name("1"))
    )


class Scaling(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x, by=None):
        by = by.setting if hasattr(by, "setting") else by
        factor = by.scale + by.shift if hasattr(by, "scale") else 1.0
        return x * self.weight * factor


class Options:
    """Hashed by identity."""

    def __init__(self, scale):
        self.scale, self.shift = scale, 0.0


@dataclass
class Unfrozen:
    scale: float
    shift: float = 0.0
    __hash__ = object.__hash__


class Tagged(int):
    """Has an attribute beside its value."""

    def __new__(cls, value, scale):
        made = super().__new__(cls, value)
        made.scale = scale
        return made


def test_a_field_that_is_not_compared_has_graphs_of_its_own():
    encoder, rows = encoder_of(Scaling()), rows_for([6])
    for shift in (0.0, 1.0, 2.0):
        assert distance(encoder(rows, lengths=[6], by=Setting(2.0, shift)), rows * (2.0 + shift)) < 1e-6
    assert encoder.stats.replays.total() == 3


CHANGEABLE = {
    "an object": (Options(2.0), "is a Options, which may change"),
    "a dataclass": (Unfrozen(2.0), "is a Unfrozen, which may change"),
    "a bound method": (Options(1.0).__init__, "is a method, which may change"),
    "an object in a tuple": ((1, Options(2.0)), "is a tuple, which holds a Options, and may change"),
    "a list in a frozen dataclass": (Setting(1.0, [1]), "is a Setting, which holds a list, and may change"),
    "a number with attributes": (Tagged(1, 2.0), "is a Tagged, which may change"),
    "an array": (numpy.ones(3), "is a ndarray, which may change"),
    "a dict": ({"scale": 1}, "is a dict, which may change"),
}


@pytest.mark.parametrize(("value", "message"), CHANGEABLE.values(), ids=CHANGEABLE)
def test_values_that_may_change_are_refused(value, message):
    encoder = encoder_of(Scaling())
    with pytest.raises(
        vg.errors.InputError, match=f"argument 'by' {message}, while the graphs captured for it do not; pass a"
    ):
        encoder(rows_for([6]), lengths=[6], by=value)


def test_nan_is_captured_once():
    class Filling(nn.Linear):
        def forward(self, x, fill=0.0):
            return super().forward(x) + fill

    encoder = encoder_of(Filling(8, 8))
    for _ in range(3):
        assert encoder(rows_for([6]), lengths=[6], fill=float("nan")).isnan().all()
    assert len(encoder.executor.store.sets) == 1


@pytest.mark.parametrize("default", [numpy.ones(3), torch.ones(3), [1, 2], {"a": [1.0]}, math.nan])
def test_any_default_may_be_left_out_or_passed(default):
    class Defaulted(nn.Linear):
        def forward(self, x, by=default):
            return super().forward(x) * (2.0 if by is None else 1.0)

    encoder, rows = encoder_of(Defaulted(8, 8)), rows_for([6])
    expected = encoder(rows, lengths=[6])
    if not isinstance(default, torch.Tensor):
        assert torch.equal(encoder(rows, lengths=[6], by=default), expected)
    assert torch.equal(encoder(rows, lengths=[6], by=None), 2 * expected)
    assert encoder.stats.replays.total() == encoder.stats.calls


def test_a_list_like_the_default_is_the_default_and_another_is_refused():
    class Listed(nn.Linear):
        def forward(self, x, by=[1, {"a": 2}]):  # noqa: B006
            return super().forward(x)

    encoder, rows = encoder_of(Listed(8, 8)), rows_for([6])
    encoder(rows, lengths=[6], by=[1, {"a": 2}])
    for other in ([1, {"a": 2.0}], [1, {"b": 2}], [1], [True, {"a": 2}], numpy.ones(3)):
        with pytest.raises(vg.errors.InputError, match="may change"):
            encoder(rows, lengths=[6], by=other)


def unverified(**options):
    """An encoder whose many captures take little time."""
    return encoder_of(Scaling(), budgets=[64], verify=UNVERIFIED, **options)


def test_ever_new_values_are_captured_up_to_a_limit_and_run_eager_beyond():
    encoder, rows = unverified(), rows_for([6])
    for by in range(MOST_SETS):
        encoder(rows, lengths=[6], by=0.5 + by)
    with pytest.warns(
        UserWarning, match=r"16 sets of static arguments have graphs, and Scaling .*: by=99.5, after 16 other values\."
    ):
        encoder(rows, lengths=[6], by=99.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for by in range(100, 120):
            assert torch.equal(encoder(rows, lengths=[6], by=by), encoder.eager(rows, lengths=[6], by=by))
    assert encoder.stats.eager == {TOO_MANY_SETS: 21}
    encoder(rows, lengths=[6], by=0.5)  # has graphs
    assert len(encoder.executor.store.sets) == MOST_SETS
    assert "\n  by=0.5\n  by=1.5\n" in encoder.report()
    encoder.capture(by=7)(rows, lengths=[6], by=7)
    assert encoder.stats.replays.total() == MOST_SETS + 2
    encoder.release()
    encoder(rows, lengths=[6], by=99.5)
    assert encoder.stats.eager == {TOO_MANY_SETS: 21}


def test_items_that_no_budget_holds_are_an_error_beyond_the_limit_too():
    encoder = unverified(on_miss="error")
    for by in range(MOST_SETS):
        encoder(rows_for([6]), lengths=[6], by=by)
    with pytest.raises(vg.errors.BudgetError):
        encoder(rows_for([300]), lengths=[300], by=99)


def test_requests_for_ever_new_values_are_bounded():
    encoder, rows = unverified(capture=vg.options.Capture(lazy=True)), rows_for([6])
    for _ in range(3):
        encoder(rows, lengths=[6], by=7)
    for by in range(8, 300):
        encoder(rows, lengths=[6], by=by)
    assert len(encoder.capture_pending(None)) == len(encoder.executor.store.sets) == MOST_SETS
    assert not encoder.capture_pending(None)
    assert encoder.stats.eager == {"not captured yet": encoder.stats.calls}
    encoder(rows, lengths=[6], by=300)
    assert encoder.stats.eager[TOO_MANY_SETS] == 1
    before = encoder.stats.replays.total()
    encoder(rows, lengths=[6], by=7)  # requested most
    assert encoder.stats.replays.total() == before + 1


class Printed(float):
    """Prints the same whatever it is."""

    def __repr__(self):
        return "printed"


@dataclass(frozen=True)
class Text(str):
    """A text with a field."""

    number: int = 1

    def __new__(cls, text, number=1):
        return str.__new__(cls, text)

    def __init__(self, text, number=1):
        object.__setattr__(self, "number", number)


@pytest.mark.parametrize(("one", "other"), [
    (Decimal("1.0"), Decimal("1.00")), (range(0, 3, 2), range(0, 4, 2)), (PureWindowsPath("A"), PureWindowsPath("a")),
    (frozenset([8, 0, 16]), frozenset([16, 8, 0])),
])  # fmt: skip
def test_values_that_are_equal_and_not_alike_are_told_apart(one, other):
    assert one == other
    assert static_key({"by": one}) != static_key({"by": other})


@pytest.mark.parametrize("value", [Printed(1.0), Text("a")])
def test_values_that_hold_more_than_they_show_are_refused(value):
    with pytest.raises(ChangeableError):
        static_key({"by": value})


@pytest.mark.parametrize("other", [{"add": 3.0, "mul": 2.0}, {"mul": 2.0, "add": 3}, {"mul": 2.0}])
def test_a_dict_that_is_not_quite_the_default_is_refused(other):
    class Applies(torch.nn.Module):
        def forward(self, x, operations={"mul": 2.0, "add": 3.0}):  # noqa: B006
            for name, value in operations.items():
                x = x * value if name == "mul" else x + value
            return x

    encoder, rows = encoder_of(Applies().eval()), torch.ones(6, 8)
    assert torch.equal(encoder(rows, lengths=[6], operations={"mul": 2.0, "add": 3.0}), rows * 5)
    with pytest.raises(vg.errors.InputError, match="'operations' is a dict, which may change"):
        encoder(rows, lengths=[6], operations=other)
    assert torch.equal(encoder(rows, lengths=[6]), rows * 5)
