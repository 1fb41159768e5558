"""A forward under torch's compiler: one compilation for all budgets, and an error where it would take more."""

import pytest
import torch

import varlen_graphs as vg
from varlen_graphs.compiled import CompiledForward


def test_one_compilation_serves_every_number_of_rows():
    weight = torch.randn(8, 8)

    def forward(x, cu_seqlens, max_seqlen):
        q = (x @ weight).unflatten(-1, (2, 4))
        return vg.varlen_attention(q, q, q, cu_seqlens, max_seqlen).flatten(1) * 0.5 + x

    compiled = CompiledForward(forward, backend="aot_eager")
    assert compiled.seconds is None
    for rows in (8, 64, 24, 16, 128):  # the first has as many rows as channels
        x, cu_seqlens = torch.randn(rows, 8), torch.tensor([0, rows // 2, rows], dtype=torch.int32)
        torch.testing.assert_close(compiled(x, cu_seqlens, rows), forward(x, cu_seqlens, rows))
    assert compiled.seconds > 0


def test_what_depends_on_the_budget_is_not_compiled_again():
    compiled = CompiledForward(lambda x, rows: x * 2 if rows > 100 else x, backend="eager")
    compiled(torch.ones(4), 10)
    with pytest.raises(
        vg.CaptureError, match=r"(?s)compile=True would compile once for each budget, because of .*rows"
    ):
        compiled(torch.ones(4), 200)
