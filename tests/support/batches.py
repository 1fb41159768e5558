"""A tower of fixed-size images, as CLIP and SigLIP are, and its declaration."""

import torch
from torch import nn

import varlen_graphs as vg
from tests.support.leftovers import keep_leftovers
from tests.support.towers import distance, equal_bits

SPEC = vg.BufferSpec(
    "pixel_values", vg.Batch(), outputs=vg.outputs.Fields(patches=vg.outputs.Rows(), pooled=vg.outputs.Items())
)


class FixedSize(nn.Module):
    """Patches of images, attention over those of each, and their mean."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 24)
        self.eval().requires_grad_(False)

    def forward(self, pixel_values):
        x = self.embed(pixel_values).flatten(2).mT
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return {"patches": x, "pooled": x.mean(1)}


def images(count, side, seed=0, device="cpu"):
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed)).to(device)


def check_batch_contract(encoder, device, tolerance=1e-5, dtype=torch.float32):
    """Check the padding contract, and that the same batch gives the same bits whatever was there before."""
    for seed, count in enumerate((7, 1, 3, 8, 2, 20)):
        x = images(count, 16, seed, device).to(dtype)
        encoder(x)
        encoder.poison()
        over_nan = encoder(x)
        encoder(images(8, 16, 100, device).to(dtype))
        keep_leftovers(encoder)
        assert equal_bits(over_nan, encoder(x)), count
        assert distance(over_nan, encoder.module(x)) <= tolerance, count
    assert not encoder.stats.eager
