"""Synthetic calls of the check on a GPU, where an index out of range in a replay would end the use of CUDA."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.gpu import on_gpus
from tests.support.towers import distance
from tests.support.verifying import FirstRows

pytestmark = on_gpus()


@pytest.mark.filterwarnings("ignore:.*failed verification")
def test_an_index_past_the_end_of_a_full_budget_is_found_before_a_replay():
    module = FirstRows().cuda()
    spec = vg.BufferSpec("x", vg.Lengths(), [vg.buffers.CuSeqlens()], outputs=vg.outputs.Items())
    encoder = vg.GraphedEncoder(module, [64, 128], spec)
    for lengths in ([10], [100, 28], [64]):
        rows = torch.randn(sum(lengths), 8, device="cuda")
        starts = torch.tensor([0, *lengths], device="cuda").cumsum(0)
        assert distance(encoder(rows, lengths=lengths), module(rows, starts)) < 1e-5
    torch.cuda.synchronize()
    assert encoder.stats.eager == {"its budget failed verification": 3}
    assert "out of bounds" in encoder.report() or "got indices from" in encoder.report()


def test_padding_of_a_call_holds_zeros():
    """Rows that the graph copies, and rows of another width or dtype, which are copied ahead of it."""

    class Sees(torch.nn.Module):
        def forward(self, x):
            return x.clamp(-9, 9) + (x == 7).any().to(x.dtype)

    for width, dtype in ((8, torch.float32), (3, torch.bfloat16), (8, torch.float64)):
        spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(width,), dtype=torch.float32), vg.Lengths())
        encoder = vg.GraphedEncoder(Sees(), [64], spec)
        few = torch.zeros(10, width, device="cuda", dtype=dtype)
        many = torch.full((60, width), 7.0, device="cuda", dtype=dtype)
        assert (encoder(many, lengths=[60]) == 8).all()
        assert not encoder(few, lengths=[10]).any()
        assert not encoder.stats.eager
