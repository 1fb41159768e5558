"""A module that tells segments apart, and calls of it in which some have no rows."""

import numpy
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import Attention, rows_for
from tests.support.segments import boundaries
from tests.support.towers import distance

EMPTY = "an item has no rows"
"""Reason of eager runs."""


class Segments(nn.Module):
    """Attention in segments, and the sum and the number of the rows of each item, told by the boundaries."""

    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.eval()

    def forward(self, x, lengths, cu_seqlens, max_seqlen):
        rows = self.attention(x, cu_seqlens, max_seqlen)
        start, end = cu_seqlens[: len(lengths), None], cu_seqlens[1 : len(lengths) + 1, None]
        place = torch.arange(len(x), device=x.device)
        own = (start <= place) & (place < end)
        return {"rows": rows, "sums": torch.where(own[..., None], rows, 0).sum(1), "counts": own.sum(1)}


SEGMENTS = vg.BufferSpec(
    vg.inputs.Rows("x", (8,)),
    vg.Lengths(),
    [vg.buffers.CuSeqlens(), vg.buffers.MaxSeqlen()],
    outputs=vg.outputs.Fields(rows=vg.outputs.Rows(), sums=vg.outputs.Items(), counts=vg.outputs.Items()),
)
WITH_EMPTY = [[4, 0, 7], [0, 4, 7], [4, 7, 0], [0, 0, 11, 0]]


def check_empty_segments(lengths, device="cpu", **options):
    """Compare calls with the module's own answer, whoever sees their lengths."""
    module, rows = Segments().to(device), rows_for([11], device=device)
    encoder = vg.GraphedEncoder(module, [vg.budgets.Budget(64, items=8)], SEGMENTS, **options)
    with torch.no_grad():
        expected = module(rows, torch.tensor(lengths), boundaries(lengths).to(device), max(lengths))
    unseen = [torch.tensor(lengths, device=device), torch.tensor(lengths, dtype=torch.int32, device=device)]
    for layout in (lengths, numpy.array(lengths), *unseen):
        got = encoder(rows, lengths=layout)
        encoder.check()
        for name, output in expected.items():
            assert got[name].shape == output.shape
            assert distance(got[name].float(), output.float()) < 1e-5, (name, layout)
    assert encoder.stats.eager == {EMPTY: 2}  # what the GPU alone sees is replayed
    assert encoder.stats.wrong_layouts == 0
