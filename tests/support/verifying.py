"""Calls to verify, and modules that verification finds wrong."""

import pytest
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import rows_for


def calls_of(*layouts, device="cpu"):
    """Return one call for each list of lengths."""
    return [{"x": rows_for(lengths, seed, device=device), "lengths": lengths} for seed, lengths in enumerate(layouts)]


CALLS = calls_of([60, 40, 3], [5, 9], [2])


def refused(encoder, calls=CALLS):
    """Verify calls, and return the error that this raises."""
    with pytest.raises(vg.errors.VerificationError) as error:
        encoder.verify(calls)
    return str(error.value)


class WrongAt64(nn.Module):
    """Gives the double where there are 64 rows: a Python branch, which is another one without padding."""

    def __init__(self):
        super().__init__()
        self.linear, self.runs = nn.Linear(8, 8), 0

    def forward(self, x):
        self.runs += 1
        return self.linear(x) * (2 if len(x) == 64 else 1)


class FirstRows(nn.Module):
    """The first row of each item, where items that are not there begin past the end of a budget whose rows are full."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, cu_seqlens):
        return self.linear(x)[cu_seqlens[:-1]]
