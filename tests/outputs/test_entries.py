"""`outputs.Entries`, which follow from the rows of each item, and columns that follow from all items of a call."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.support.contract import check_padding_contract, check_ways_to_call
from tests.support.thirds import ENTRIES, expected_thirds, thirds_encoder, thirds_rows
from tests.support.towers import distance


def test_the_padding_contract_holds():
    layouts = [[64, 64], [1], [4, 60], [64], [1] * 8, [128], [20, 31]]
    check_padding_contract(thirds_encoder(), expected_thirds, thirds_rows, "lengths", layouts, 1e-5)


@pytest.fixture(scope="module")
def shared():
    """Captured once, for all examples of a property."""
    return thirds_encoder()


@settings(max_examples=30)
@given(st.lists(st.integers(1, 140), min_size=1, max_size=12), st.integers(0, 3))
def test_any_call_has_the_entries_of_its_items_however_it_is_split(shared, lengths, seed):
    """The longest item of the call counts, not that of a replay."""
    rows = thirds_rows(lengths, seed)
    expected = expected_thirds(rows, lengths)
    for run in (shared, shared.eager):
        assert distance(run(rows, lengths=lengths), expected) < 1e-5


def test_a_call_may_be_staged_or_described_on_the_device():
    encoder, lengths = thirds_encoder(), [20, 31, 7]
    rows = thirds_rows(lengths)
    expected = check_ways_to_call(encoder, rows, lengths)
    assert distance(expected, expected_thirds(rows, lengths)) < 1e-5
    with pytest.raises(vg.errors.LayoutError, match="lengths describes 3 items of 57 rows in all, but x has 58 rows"):
        encoder(rows, lengths=torch.tensor([20, 30, 7]))  # at once: the host has to see such items


def test_a_capacity_that_the_output_has_not_is_refused():
    entries = vg.outputs.Entries(ENTRIES.of_item, lambda budget: budget.rows // 3)
    with pytest.raises(
        vg.errors.SpecError, match=r"an output of shape \[.*\] is declared as Entries\(.*: expected \[\d+, \.\.\.\] at"
    ):
        thirds_encoder(entries=entries).capture()


def test_more_entries_than_there_is_room_for_are_refused():
    entries = vg.outputs.Entries(lambda rows: rows, ENTRIES.at_budget)
    with pytest.raises(vg.errors.SpecError, match=re.escape(": expected at_budget to return")):
        thirds_encoder(entries=entries)(thirds_rows([30]), lengths=[30])


def test_a_column_with_a_function_is_no_argument():
    encoder, rows = thirds_encoder(), thirds_rows([6])
    with pytest.raises(vg.errors.InputError, match="argument 'longest' is computed inside the graph; leave it out"):
        encoder(rows, lengths=[6], longest=[6])


def test_a_column_needs_one_integer_for_each_item():
    spec = vg.BufferSpec("x", vg.Lengths(columns=(vg.layouts.Column("half", function=lambda call: [0.5]),)))
    encoder = vg.GraphedEncoder(nn.Identity(), [128], spec, forward=lambda module, x: module(x), backend="tape")
    with pytest.raises(
        vg.errors.LayoutError, match=re.escape("half is [0.5]: expected one integer for each of 1 item")
    ):
        encoder(torch.zeros(2, 1), lengths=[2])
