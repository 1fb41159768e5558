"""Padding may hold any number that an earlier call left there: modules that look for rare ones are refused."""

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import BUDGETS, rows_for

RARE = {
    "inf": torch.isinf,
    "posinf": torch.isposinf,
    "neginf": torch.isneginf,
    "nan": torch.isnan,
    "large": lambda x: x.isfinite() & (x > 1e3),
    "larger": lambda x: x.isfinite() & (x > 2e4),
    "large negative": lambda x: x.isfinite() & (x < -1e3),
    "some hundred": lambda x: (x > 50) & (x < 1000),
    "-1": lambda x: x == -1,
    "zeros": lambda x: (x == 0).all(-1),
}


class Halves(nn.Module):
    """Halves all rows if a number of a kind is among them."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        x = x.float()
        return torch.where(RARE[self.kind](x).any(), x * 0.5, x)


@pytest.mark.parametrize("kind", RARE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_module_that_looks_for_a_rare_number_in_all_rows_is_refused(kind, dtype):
    rows = rows_for([12, 8]).to(dtype)
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,), dtype=dtype), vg.Lengths())
    encoder = vg.GraphedEncoder(Halves(kind).eval(), BUDGETS, spec, backend="tape")
    with pytest.warns(UserWarning, match="failed verification"):
        assert torch.equal(encoder(rows, lengths=[12, 8]), rows.float())


def test_padding_of_a_type_without_infinity_is_poisoned_too():
    rows = rows_for([12, 8]).to(torch.float8_e4m3fn)
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,), dtype=rows.dtype), vg.Lengths())
    encoder = vg.GraphedEncoder(Halves("nan").eval(), BUDGETS, spec, backend="tape")
    with pytest.warns(UserWarning, match="failed verification"):
        assert torch.equal(encoder(rows, lengths=[12, 8]), rows.float())
