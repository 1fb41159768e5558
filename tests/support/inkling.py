"""Small vision towers of Inkling and Inkling 2, and rows for them."""

import importlib

import pytest
import torch

from benchmarks.generic import enlarge
from tests.support.towers import pixels

INKLING = {"patch_size": 4, "n_layers": 3, "hidden_size": 32, "num_attention_heads": 2, "text_hidden_size": 24}
INKLING2 = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4,
    "posemb_grid_size": 6, "projection_hidden_dim": 40, "text_hidden_size": 24,
}  # fmt: skip


def inkling_tower(package, dtype=torch.float32, seed=0):
    """Return a tower with random weights; skip the test where transformers has none."""
    folder = f"transformers.models.{package}"
    modeling = pytest.importorskip(f"{folder}.modeling_{package}", reason=f"this transformers has no {package}")
    name = package.title()
    config = getattr(importlib.import_module(f"{folder}.configuration_{package}"), f"{name}VisionConfig")
    torch.manual_seed(seed)
    settings = INKLING2 if package == "inkling2" else INKLING
    tower = getattr(modeling, f"{name}VisionModel")._from_config(config(**settings), dtype=dtype)
    enlarge(tower)
    return tower.eval()


def tokens_of(device="cpu", dtype=torch.float32):
    """Return a function that makes the rows of a grid of Inkling 2."""

    def rows(grid, seed=0):
        return pixels(grid, seed, row=8 * 8 * 3, device=device, dtype=dtype).view(-1, 8, 8, 3)

    return rows


def original_of(tower):
    """Return a function of rows and a grid that runs a tower of Inkling 2 without an encoder."""

    def run(rows, grid, **asked):
        with torch.no_grad():
            own = rows.to(next(tower.parameters()).dtype)
            return tower(own, image_grid_thw=torch.tensor(grid, device=rows.device), **asked)

    return run
