"""Towers whose patches begin with their line and column, tiny and with random weights, and batches of patches."""

import importlib

import pytest
import torch

import varlen_graphs as vg
from tests.support.towers import distance, equal_bits

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES = {
    "pix2struct": {**SMALL, "d_kv": 8, "d_ff": 32, "seq_len": 64, "patch_embed_hidden_size": 12},
    "kosmos2_5": {**SMALL, "head_dim": 8, "max_num_patches": 64, "patch_embed_hidden_size": 12},
}
CLASSES = {"pix2struct": "Pix2StructVision", "kosmos2_5": "Kosmos2_5Vision"}
"""Beginnings of the names of configurations and towers, by the names of their files."""

BUDGETS = [vg.budgets.Budget.padded(2, 16), vg.budgets.Budget.padded(4, 48)]


def patches_tower(kind):
    """Return a tower, or skip."""
    path, name = f"transformers.models.{kind}", CLASSES[kind]
    file = pytest.importorskip(f"{path}.modeling_{kind}", reason=f"this version of transformers has no {kind}")
    configs = importlib.import_module(f"{path}.configuration_{kind}")
    torch.manual_seed(0)
    config = getattr(configs, f"{name}Config")(**SIZES[kind])
    return getattr(file, f"{name}Model")._from_config(config).eval()


def patches_of(sizes, spare=0, seed=0):
    """Return patches of images of these sizes behind their positions, and zeros."""
    generator = torch.Generator().manual_seed(seed)
    patches = torch.zeros(len(sizes), max(h * w for h, w in sizes) + spare, 14)
    for own, (h, w) in zip(patches, sizes, strict=True):
        place = torch.arange(h * w)
        own[: h * w] = torch.randn(h * w, 14, generator=generator)
        own[: h * w, 0], own[: h * w, 1] = place // w + 1, place % w + 1
    return patches


CALLS = [[(3, 4)], [(2, 3), (4, 3)], [(5, 7), (1, 1), (4, 8)], [(3, 3)] * 4, [(6, 8)]]


def check_patches(encoder, device="cpu", tolerance=1e-5):
    """Check that outputs are those of the tower, padding included, whatever the memory held before."""
    encoder.capture()
    with torch.no_grad():
        for seed, sizes in enumerate(CALLS):
            for spare in (0, 3):
                if max(h * w for h, w in sizes) + spare > 48:
                    continue
                patches = patches_of(sizes, spare, seed).to(device)
                expected = encoder.module(patches)
                encoder.poison()
                over_nan = encoder(patches)
                encoder(patches_of([(6, 8)] * 4, seed=99).to(device))
                again = encoder(flattened_patches=patches, attention_mask=(patches.sum(-1) != 0).float())
                assert type(over_nan) is type(expected)
                assert over_nan.last_hidden_state.shape == expected.last_hidden_state.shape
                assert distance(over_nan.last_hidden_state, expected.last_hidden_state) < tolerance
                assert equal_bits(again.last_hidden_state, over_nan.last_hidden_state)
    assert not encoder.stats.eager
