"""A small C-RADIO with random weights."""

import inspect

import pytest
import torch

from benchmarks.generic import enlarge

ROW = 3 * 4 * 4


def radio_tower(dtype=torch.float32, **changes):
    modeling = pytest.importorskip("transformers.models.radio.modeling_radio")
    configuration = pytest.importorskip("transformers.models.radio.configuration_radio")
    if "image_grid_hw" not in inspect.signature(modeling.RadioModel.forward).parameters:
        pytest.skip("in this transformers C-RADIO takes batches alone")
    settings = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4, "image_size": 16,
        "max_img_size": 28, "patch_dim": ROW, "video_temporal_patch_size": 2, "video_patch_dim": 2 * ROW,
    }  # fmt: skip
    torch.manual_seed(0)
    tower = modeling.RadioModel._from_config(configuration.RadioConfig(**settings | changes), dtype=dtype)
    enlarge(tower)
    return tower.eval()


def patches(shapes, seed=0, device="cpu", dtype=torch.float32):
    x = torch.randn(sum(h * w for h, w in shapes), ROW, generator=torch.Generator().manual_seed(seed))
    return x.to(device, dtype)


def radio_original(tower):
    """Return a function of patches and shapes that runs a tower without an encoder."""

    def run(rows, shapes, **asked):
        with torch.no_grad():
            return tower(rows, image_grid_hw=torch.tensor(shapes, device=rows.device), **asked)

    return run
