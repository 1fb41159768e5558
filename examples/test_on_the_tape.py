"""Test an encoder on machines without a GPU, with pytest or as a script."""

import pytest
import torch
from text_encoder import TextEncoder, graph

import varlen_graphs as vg

LAYOUTS = [[17, 230, 5], [1], [512], [3] * 20, [300, 200]]


def worst_difference():
    torch.manual_seed(0)
    graphed = graph(TextEncoder().eval(), backend="tape")
    worst = 0.0
    for lengths in LAYOUTS:
        input_ids = torch.randint(1000, (sum(lengths),))
        expected = graphed.eager(input_ids, lengths=lengths)
        graphed(input_ids, lengths=lengths)
        graphed.poison()  # fills all memory that a replay must not read with NaN
        got = graphed(input_ids, lengths=lengths)
        worst = max(worst, *((got[name] - expected[name]).abs().max().item() for name in got))
    return worst


def test_graphs_equal_eager_whatever_the_padding_holds():
    assert worst_difference() < 1e-5


def test_what_no_graph_can_hold_is_named():
    class Careless(TextEncoder):
        def forward(self, input_ids, position_ids, cu_seqlens, max_seqlen, first_rows):
            longest = cu_seqlens.diff().max().item()  # reads a tensor on the host during the forward
            return super().forward(input_ids, position_ids, cu_seqlens, longest, first_rows)

    with pytest.raises(vg.errors.CaptureError, match=r"Tensor.item reads a tensor on the host"):
        graph(Careless().eval(), backend="tape")(torch.zeros(5, dtype=torch.int64), lengths=[5])


if __name__ == "__main__":
    test_what_no_graph_can_hold_is_named()
    print("largest difference from eager:", worst_difference())
