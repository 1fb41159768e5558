"""Padded batches on real CUDA graphs."""

import torch
from torch import nn

import varlen_graphs as vg
from tests.support.gpu import on_gpus

pytestmark = on_gpus()

DIM = 64


class Transformer(nn.Module):
    """Torch's own encoder over a padded batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(DIM, 4, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x, padding=None):
        return self.encoder(x, src_key_padding_mask=padding)


def test_padded_batches():
    module = Transformer().cuda().eval()
    layout = vg.PaddedMask("padding", dtype=torch.bool, real=False)
    budgets = [vg.Budget.padded(batch, length) for batch in (2, 8) for length in (32, 96)]
    encoder = vg.GraphedEncoder(module, budgets, vg.BufferSpec(vg.PackedRows("x", shape=(DIM,)), layout)).capture()
    for seed, lengths in enumerate(([5, 30], [96] * 8, [1], [90, 3, 40, 40, 7], [20] * 20, [64, 96, 1])):
        generator = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(len(lengths), max(lengths), DIM, device="cuda", generator=generator)
        padding = torch.arange(max(lengths), device="cuda") >= torch.tensor(lengths, device="cuda")[:, None]
        x[padding] = torch.nan
        expected = torch.zeros_like(x)
        with torch.no_grad():
            for item, length in enumerate(lengths):
                expected[item, :length] = module(x[item : item + 1, :length])[0]
        encoder.poison()
        for mask in (padding, padding.cpu()):
            torch.testing.assert_close(encoder(x, padding=mask), expected, rtol=1e-3, atol=1e-3)
    assert not encoder.stats.eager
