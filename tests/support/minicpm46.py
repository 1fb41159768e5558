"""Small vision towers of MiniCPM-V 4.6, and strips of patches for them."""

import importlib

import pytest
import torch

from benchmarks.generic import enlarge
from tests.support.towers import pixels

PATCH = 4
SETTINGS = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "patch_size": PATCH,
    "image_size": 28, "insert_layer_id": 1,
}  # fmt: skip


def strip_tower(dtype=torch.float32, seed=0, **settings):
    """Return a tower with random weights; skip the test where transformers has none that takes slices of any size."""
    folder = "transformers.models.minicpmv4_6"
    modeling = pytest.importorskip(f"{folder}.modeling_minicpmv4_6", reason="this transformers has no MiniCPM-V 4.6")
    if hasattr(modeling, "get_vision_merged_shape"):
        pytest.skip("this transformers merges all slices at the size of the first one")
    config = importlib.import_module(f"{folder}.configuration_minicpmv4_6").MiniCPMV4_6VisionConfig
    torch.manual_seed(seed)
    tower = modeling.MiniCPMV4_6VisionModel._from_config(config(**SETTINGS | settings), dtype=dtype)
    enlarge(tower)
    return tower.eval()


def strips_of(device="cpu", dtype=torch.float32):
    """Return a function that makes the strip of slices of some sizes."""

    def strip(sizes, seed=0):
        rows = pixels([(1, h, w) for h, w in sizes], seed, row=3 * PATCH**2, device=device, dtype=dtype)
        return rows.view(-1, 3, PATCH, PATCH).permute(1, 2, 0, 3).flatten(2)[None]

    return strip


def original_of(tower):
    """Return a function of a strip and sizes that runs a tower without an encoder."""

    def run(strip, sizes, **asked):
        with torch.no_grad():
            own = strip.to(next(tower.parameters()).dtype)
            return tower(own, target_sizes=torch.tensor(sizes, device=strip.device), **asked)

    return run
