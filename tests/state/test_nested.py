"""Encoders inside of modules with state, and several encoders of one such module."""

import copy

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import rows_for
from tests.support.kept import differences
from tests.support.runs import ran, runs_of
from tests.support.segments import relative

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.ready = nn.Linear(8, 8), False

    def forward(self, x):
        ran(self, x)
        self.ready = True
        return self.lin(x)


class Outer(nn.Module):
    """Its part may be an encoder, which it calls as it calls the part itself but for the lengths."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.inner, self.ready = nn.Linear(8, 8), Inner(), False
        self.eval()

    def forward(self, x):
        ran(self, x)
        self.ready = True
        y = self.lin(x)
        return self.inner(y, lengths=[len(y)]) if isinstance(self.inner, vg.GraphedEncoder) else self.inner(y)


def encoder_of(module):
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths())
    return vg.GraphedEncoder(module, [64, 256], spec, backend="tape")


def test_a_module_whose_part_is_an_encoder_is_never_silently_wrong():
    outer, plain = Outer(), Outer()
    outer.inner = encoder_of(outer.inner)
    encoder = encoder_of(outer)
    for lengths in ([5], [150], [3, 4], [200], [5]):
        rows = rows_for(lengths)
        try:
            got = encoder(rows, lengths=lengths)
        except vg.errors.VarlenGraphsError:
            return  # refused
        assert relative(got, plain(rows)) < 1e-5


def test_an_encoder_as_a_part_leaves_what_its_own_first_call_leaves():
    outer, plain = Outer(), Outer()
    outer.inner = encoder_of(outer.inner)
    rows = rows_for([5])
    assert relative(outer(rows), plain(rows)) < 1e-5
    assert not differences(outer.inner.module, plain.inner)
    assert runs_of(outer, outer.inner.module) == [5, 5]


def test_each_encoder_of_a_module_runs_it_once():
    module, plain = Outer(), Outer()
    first, second = encoder_of(module), encoder_of(module)
    for encoder, lengths in ((first, [5]), (second, [150])):
        rows = rows_for(lengths)
        assert relative(encoder(rows, lengths=lengths), plain(rows)) < 1e-5
        assert not differences(module, plain)
        assert runs_of(module) == lengths


def test_a_module_and_its_part_may_each_have_an_encoder():
    module, plain = Outer(), Outer()
    of_part, of_all = encoder_of(module.inner), encoder_of(module)
    rows = rows_for([5])
    for _ in range(2):
        assert relative(of_part(rows, lengths=[5]), plain.inner(rows)) < 1e-5
        assert relative(of_all(rows, lengths=[5]), plain(rows)) < 1e-5
    rows = runs_of(module, module.inner)
    assert set(rows) == {5}
    assert len(rows) <= 5


def test_a_copy_of_a_module_that_was_graphed_is_the_copys_own():
    module = Outer()
    encoder, rows = encoder_of(module), rows_for([5])
    encoder(rows, lengths=[5])
    other = copy.deepcopy(module)
    other.lin.weight.mul_(-1)
    assert relative(encoder_of(other)(rows, lengths=[5]), other.inner.lin(other.lin(rows))) < 1e-5
    assert relative(encoder(rows, lengths=[5]), module.inner.lin(module.lin(rows))) < 1e-5


def test_what_a_module_keeps_may_be_loaded_again():
    """A state dict holds what plain calls leave, and loads into a plain module."""

    class Counting(Outer):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.steps += 1
            return super().forward(x)

    module, plain = Counting(), Counting()
    encoder, rows = encoder_of(module), rows_for([5])
    encoder(rows, lengths=[5]), plain(rows)
    assert module.state_dict().keys() == encoder.state_dict().keys() == plain.state_dict().keys()
    assert not differences(dict(module.state_dict()), dict(plain.state_dict()))
