"""The dtype in which a module gets its rows."""

import pytest
import torch
from torch import nn

from tests.support.encoders import encoder_of, rows_for


class Mixed(nn.Module):
    """Has a vector of another dtype ahead of its matrix."""

    def __init__(self, first, matrix):
        super().__init__()
        self.token = nn.Parameter(torch.ones(1, 8, dtype=first))
        self.linear = nn.Linear(8, 8, dtype=matrix)
        self.requires_grad_(False)

    def forward(self, x):
        return self.linear(x) + self.token.to(x.dtype)


@pytest.mark.parametrize(
    ("first", "matrix"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float64, torch.float32)],
)
def test_rows_come_in_the_dtype_of_the_matrix_that_they_meet(first, matrix):
    module, rows = Mixed(first, matrix).eval(), rows_for([12, 8]).to(matrix)
    encoder = encoder_of(module)
    torch.testing.assert_close(encoder(rows, lengths=[12, 8]), module(rows))
    assert encoder.stats.replays.total() == 1


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8, dtype=torch.float64)
        self.requires_grad_(False)

    def forward(self, x):
        return self.norm(x)


def test_rows_of_a_module_of_vectors_come_in_the_dtype_of_the_first():
    module, rows = Norm().eval(), rows_for([12, 8]).double()
    encoder = encoder_of(module)
    torch.testing.assert_close(encoder(rows, lengths=[12, 8]), module(rows))
    assert encoder.stats.replays.total() == 1
