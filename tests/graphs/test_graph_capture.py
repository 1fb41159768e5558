"""Captures that end early leave no graph in use that is not proven."""

import warnings

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import encoder_of, rows_for


class Mixing(nn.Module):
    """Mixes all rows of a call, and takes no more than 200."""

    def forward(self, x):
        if len(x) > 200:
            raise ValueError("at most 200 rows")
        return x - torch.nan_to_num(x, 0, 0, 0).clamp(-3, 3).mean(0)


def test_warnings_that_are_errors_leave_nothing_unproven():
    module, rows = Mixing().eval(), rows_for([12, 8])
    encoder = encoder_of(module, budgets=[64, 128, 256])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            encoder(rows, lengths=[12, 8])
        for _ in range(3):
            torch.testing.assert_close(encoder(rows, lengths=[12, 8]), module(rows))
    assert not encoder.stats.replays


class Number(int):
    def __repr__(self):
        return "a number"


class Text(str):
    """A text with an attribute."""


def text(x):
    made = Text("rows")
    made.rows = len(x)
    return made


@pytest.mark.parametrize("value", [lambda x: Number(len(x)), text], ids=["number", "text"])
def test_python_values_of_outputs_that_show_less_than_they_hold_are_refused(value):
    class Telling(nn.Module):
        def forward(self, x):
            return {"x": x * 2, "rows": value(x)}

    with pytest.raises(vg.errors.SpecError, match="Of subclasses of numbers and texts it is not known"):
        encoder_of(Telling().eval())(rows_for([6]), lengths=[6])


def test_a_function_of_outputs_that_calls_the_encoder_is_refused():
    def of_item(rows):
        if calls:
            calls.pop()(rows_for([6]), lengths=[6])
        return rows

    calls = []
    spec = vg.BufferSpec("x", vg.Lengths(), outputs=vg.outputs.Entries(of_item, lambda budget: budget.rows))
    encoder = vg.GraphedEncoder(nn.Identity().eval(), [64], spec, forward=lambda module, x: x * 2, backend="tape")
    rows = rows_for([12, 8])
    assert torch.equal(encoder(rows, lengths=[12, 8]), rows * 2)
    calls.append(encoder)
    with pytest.raises(vg.errors.VarlenGraphsError, match="a function of the declaration"):
        encoder(rows, lengths=[12, 8])
    assert torch.equal(encoder(rows, lengths=[12, 8]), rows * 2)
