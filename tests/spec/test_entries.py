"""Outputs whose entries follow from the rows of each item, and columns that follow from all items of a call."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.support.contract import check_padding_contract
from tests.support.encoders import BUDGETS
from tests.support.towers import distance, equal_bits

ENTRIES = vg.Entries(lambda rows: -(-rows // 3), lambda budget: (budget.rows + 2 * budget.items) // 3)


class Thirds(nn.Module):
    """The sum of every three rows of an item, fewer at its end, over the longest item of the call."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))  # tells the device

    def forward(self, x, entry, active, entries, longest):
        x = torch.where(active[:, None], x, 0)
        sums = x.new_zeros(entries, x.shape[1]).index_add(0, entry, x) / longest[0]
        return {"sums": sums, "across": sums.mT, "rows": x}


def entry(table):
    counts = (table.item_rows + 2) // 3
    return (counts.cumsum(0) - counts)[table.row_item] + table.row_in_item // 3


def encoder_of(budgets=BUDGETS, entries=ENTRIES, **options):
    across = vg.Entries(entries.of_item, entries.at_budget, rows_dim=1)
    spec = vg.BufferSpec(
        rows=vg.PackedRows("x", shape=(5,)),
        layout=vg.Lengths(columns=(vg.Column("longest", pad=1, function=lambda call: [max(call.rows)] * len(call)),)),
        buffers=[
            vg.DeviceBuffer("entry", entry, any_segments=False),
            vg.DeviceBuffer("active", lambda table: table.row_active, any_segments=False),
            vg.DeviceBuffer("entries", lambda table: ENTRIES.at_budget(table.budget), any_segments=False),
        ],
        outputs=vg.Outputs(sums=entries, across=across, rows=vg.Rows()),
    )
    return vg.GraphedEncoder(Thirds(), budgets, spec, **({"backend": "tape"} | options))


def rows_of(lengths, seed=0):
    return torch.randn(sum(lengths), 5, generator=torch.Generator().manual_seed(seed))


def expected_of(rows, lengths):
    sums = [third.sum(0) for item in rows.split(list(lengths)) for third in item.split(3)]
    sums = torch.stack(sums) / max(lengths)
    return {"sums": sums, "across": sums.mT, "rows": rows}


def test_the_padding_contract_holds():
    layouts = [[64, 64], [1], [4, 60], [64], [1] * 8, [128], [20, 31]]
    check_padding_contract(encoder_of(), expected_of, rows_of, "lengths", layouts, 1e-5)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 140), min_size=1, max_size=12), st.integers(0, 3))
def test_any_call_has_the_entries_of_its_items_however_it_is_split(lengths, seed):
    """The longest item of the call counts, not that of a replay."""
    rows, encoder = rows_of(lengths, seed), encoder_of()
    expected = expected_of(rows, lengths)
    for run in (encoder, encoder.eager):
        assert distance(run(rows, lengths=lengths), expected) < 1e-5


def test_a_call_may_be_staged_lent_or_described_on_the_device():
    encoder, lender, lengths = encoder_of(), encoder_of(outputs="borrowed"), [20, 31, 7]
    rows = rows_of(lengths)
    expected = encoder(rows, lengths=lengths)
    assert distance(expected, expected_of(rows, lengths)) < 1e-5
    with encoder.stage(lengths) as stage:
        stage.rows.copy_(rows)
    assert equal_bits(stage.output, expected)
    borrowed = lender(rows, lengths=lengths)
    assert equal_bits(borrowed.output, expected)
    assert equal_bits(borrowed.clone(), expected)
    assert equal_bits(encoder(rows, lengths=torch.tensor(lengths)), expected)
    with pytest.raises(vg.LayoutError, match="lengths describes 3 items of 57 rows in all, but x has 58 rows"):
        encoder(rows, lengths=torch.tensor([20, 30, 7]))  # at once: the host has to see such items


def test_a_capacity_that_the_output_has_not_is_refused():
    entries = vg.Entries(ENTRIES.of_item, lambda budget: budget.rows // 3)
    with pytest.raises(
        vg.SpecError, match=r"an output of shape \[.*\] is declared as Entries\(.*: expected \[\d+, \.\.\.\] at"
    ):
        encoder_of(entries=entries).capture()


def test_more_entries_than_there_is_room_for_are_refused():
    entries = vg.Entries(lambda rows: rows, ENTRIES.at_budget)
    with pytest.raises(vg.SpecError, match=re.escape("but the output has room for 24: expected at_budget to return")):
        encoder_of(entries=entries)(rows_of([30]), lengths=[30])


def test_a_column_with_a_function_is_no_argument():
    encoder, rows = encoder_of(), rows_of([6])
    with pytest.raises(vg.InputError, match="argument 'longest' is computed inside the graph; leave it out"):
        encoder(rows, lengths=[6], longest=[6])


def test_a_column_needs_one_integer_for_each_item():
    spec = vg.BufferSpec("x", vg.Lengths(columns=(vg.Column("half", function=lambda call: [0.5]),)))
    encoder = vg.GraphedEncoder(nn.Identity(), [128], spec, forward=lambda module, x: module(x), backend="tape")
    with pytest.raises(vg.LayoutError, match=re.escape("half is [0.5]: expected one integer for each of the 1 items")):
        encoder(torch.zeros(2, 1), lengths=[2])
