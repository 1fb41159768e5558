"""`buffers.SinCos` and `Lookup`: embeddings and numbers of positions, against what numpy and the host compute."""

import re

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.support import strategies
from tests.support.encoders import SIMULATED
from tests.support.minicpm import sincos_1d, sincos_2d
from tests.support.strategies import make_table
from varlen_graphs.declaration import reading


def frequencies(dim):
    return torch.from_numpy(1 / 10_000 ** (numpy.arange(dim // 2, dtype=numpy.float32) / (dim / 2)))


def squares(size):
    return torch.arange(size) ** 2 + 1000 * size


@given(strategies.tables())
def test_numbers_are_those_of_size_and_position(case):
    items, table = case
    got = vg.buffers.Lookup("numbers", squares, axes=("h", "w", "row"), largest=600).produce(table, None)
    expected = [
        (h * h + 1000 * height, w * w + 1000 * width, row * row + 1000 * t * height * width)
        for t, height, width in items
        for row in range(t * height * width)
        for h, w in [divmod(row % (height * width), width)]
    ]
    assert got.dtype == torch.int64
    assert torch.equal(got[: len(expected)], torch.tensor(expected))
    assert len(got) == table.budget.rows


@given(strategies.tables(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_sincos_of_places_equal_those_of_numpy(case, dtype):
    items, table = case
    grid = torch.from_numpy(sincos_2d(16, 12)).float()
    expected = torch.cat([grid[:h, :w].reshape(1, h * w, 16).expand(t, -1, -1).flatten(0, 1) for t, h, w in items])
    rows = torch.randn(table.budget.rows, 16).to(dtype)
    rows[len(expected) :] = torch.nan
    got = vg.buffers.add_sincos(rows, vg.buffers.SinCos("positions", frequencies(8), largest=12).produce(table, None))
    assert got.dtype == dtype
    torch.testing.assert_close(got[: len(expected)], rows[: len(expected)] + expected.to(dtype), rtol=0, atol=5e-7)
    assert got[len(expected) :].isnan().all()


class AddsNumbers(torch.nn.Linear):
    def forward(self, x, numbers):
        return super().forward(x) + numbers


def test_the_function_of_a_lookup_runs_once_for_each_size_whatever_is_captured():
    asked = []

    def numbers(size):
        asked.append(size)
        return torch.arange(size)

    lookup = vg.buffers.Lookup("numbers", numbers, axes=("row",), largest=256)
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths(), [lookup])
    encoder = vg.GraphedEncoder(AddsNumbers(8, 8).eval(), [64, 256], spec, backend="tape")
    for lengths in ([5, 9], [200, 3]):
        rows = torch.randn(sum(lengths), 8)
        at = torch.cat([torch.arange(length) for length in lengths])[:, None]
        torch.testing.assert_close(encoder(rows, lengths=lengths), torch.nn.Linear.forward(encoder.module, rows) + at)
    assert encoder.stats.replays.total() == 2
    assert asked == [*range(1, 257)]


def test_declarations_that_hold_tensors_can_be_compared():
    one, other = (vg.buffers.SinCos("positions", frequencies(8)) for _ in range(2))
    assert one == one
    assert one != other
    assert len({one, other, one}) == 2


@settings(max_examples=30)
@given(st.lists(st.integers(-1, 71_999), min_size=1, max_size=5))
def test_sincos_of_a_column_equal_those_of_numpy(times):
    layout = vg.Lengths(columns=(vg.layouts.Column("times", pad=-1),))
    values = torch.tensor([*[(1, 1, 2, time) for time in times], (0, 0, 0, -1)])
    table = vg.layouts.ItemTable(values, vg.budgets.Budget(2 * len(times) + 1), layout)
    entries, index = vg.buffers.SinCosColumn("positions", "times", frequencies(128)).produce(table, None)
    expected = torch.from_numpy(sincos_1d(128, numpy.array(times, dtype=numpy.float32))).float()
    expected[torch.tensor(times) < 0] = 0
    got = vg.buffers.add_sincos(torch.zeros(table.budget.rows, 128), (entries, index))
    torch.testing.assert_close(got[: 2 * len(times)], expected.repeat_interleave(2, 0), rtol=0, atol=5e-7)


def limited(largest, axes=("h", "w"), **options):
    """An encoder of one budget, whose numbers are known up to some size."""
    buffers = [
        vg.buffers.Lookup("numbers", squares, axes=axes, largest=largest),
        vg.buffers.SinCos("positions", frequencies(2), largest=50),
    ]
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(4,)), vg.layouts.GridHW("tgt_sizes"), buffers)
    budgets = [vg.budgets.Budget(128, items=4, segments=128)]

    def forward(module, x, numbers, positions):
        return vg.buffers.add_sincos(x, positions) + numbers[:, :1]

    return vg.GraphedEncoder(nn.Identity(), budgets, spec, forward=forward, **(SIMULATED | options))


def test_sizes_without_entries_are_refused_and_captures_do_not_meet_them():
    encoder = limited(largest=10)  # graphs are captured with items of 1 x 32
    x = torch.zeros(22, 4)
    assert torch.equal(encoder(x, tgt_sizes=[(2, 6), (10, 1)]), encoder.eager(x, tgt_sizes=[(2, 6), (10, 1)]))
    message = "tgt_sizes[1] has a size of 11, but buffer 'numbers' has entries up to 10: resize the input, or declare"
    for sizes in ([(2, 6), (11, 1)], torch.tensor([(2, 6), (11, 1)])):  # of a tensor on the GPU the host has a look
        with pytest.raises(vg.errors.LayoutError, match=re.escape(message)):
            encoder(torch.zeros(23, 4), tgt_sizes=sizes)
    with pytest.raises(
        vg.errors.LayoutError, match=re.escape("tgt_sizes[0] has a size of 51, but buffer 'positions' has")
    ):
        limited(largest=100)(torch.zeros(51, 4), tgt_sizes=[(51, 1)])
    with pytest.raises(
        vg.errors.LayoutError, match=re.escape("tgt_sizes[0] has a size of 12, but buffer 'numbers' has")
    ):
        limited(largest=10, axes=("row",))(torch.zeros(12, 4), tgt_sizes=[(2, 6)])


def test_the_host_looks_at_items_on_the_device_only_where_one_may_be_too_large(monkeypatch):
    encoder = limited(largest=30)
    encoder(torch.zeros(30, 4), tgt_sizes=torch.tensor([(5, 6)]))  # captures
    looked = []
    monkeypatch.setattr(reading, "parse", lambda *args, parse=reading.parse: looked.append(1) or parse(*args))
    encoder(torch.zeros(30, 4), tgt_sizes=torch.tensor([(5, 6)]))
    assert not looked
    encoder(torch.zeros(32, 4), tgt_sizes=torch.tensor([(4, 8)]))
    assert looked == [1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: vg.buffers.Lookup("n", squares, largest=0), "(largest=0): expected an integer of at least 1"),
        (
            lambda: vg.buffers.Lookup("n", squares, axes=("z",)),
            "axes=('z',): expected one or more of 't', 'h', 'w', 'row'",
        ),
        (lambda: vg.buffers.SinCos("p", frequencies(4), largest=0), "(largest=0): expected an integer of at least 1"),
    ],
)
def test_bad_declarations_raise_named_errors(make, message):
    with pytest.raises(vg.errors.SpecError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda size: torch.zeros(2 * size - 1).long(), "returned torch.int64 [3] for size 2: expected integers [2]"),
        (lambda size: torch.full((size,), 0.5), "returned torch.float32 [1] for size 1: expected integers [1]"),
        (lambda size: torch.full((size,), 2**40), "for size 1: expected integers [1] that fit into 32 bits"),
    ],
)
def test_a_function_that_gives_something_else_is_named(function, message):
    table = make_table([(1, 2, 2)], vg.budgets.Budget(8), vg.layouts.GridHW())
    with pytest.raises(vg.errors.SpecError, match=re.escape(message)):
        vg.buffers.Lookup("n", function, largest=4).produce(table, None)
