"""Pictures of several sizes padded to one, and tiny towers and models that take them."""

import importlib

import pytest
import torch

from benchmarks.generic import enlarge

PATCH = 4
"""Side of a patch of all towers here, in pixels."""

TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 8,
    "patch_size": PATCH, "image_size": 64,
}  # fmt: skip

WORDS = {
    "vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "eos_token_id": None, "max_position_embeddings": 256,
}  # fmt: skip

IMAGE = 190
"""Id of the token for images."""


def build(package, config_name, model_name, dtype=torch.float32, seed=0, **configuration):
    """Return a model of transformers with enlarged weights; skip the test where transformers has none."""
    folder = f"transformers.models.{package}"
    modeling = pytest.importorskip(f"{folder}.modeling_{package}", reason=f"this transformers has no {package}")
    config = getattr(importlib.import_module(f"{folder}.configuration_{package}"), config_name)(**configuration)
    torch.manual_seed(seed)
    model = getattr(modeling, model_name)._from_config(config, dtype=dtype).eval()
    enlarge(model)
    return model


def pictures(sizes, seed=0, padded=None, device="cpu"):
    """Return pictures of images of these sizes in patches, padded with NaN to a size in patches or the largest one."""
    height, width = padded or map(max, zip(*sizes, strict=True))
    generator = torch.Generator().manual_seed(seed)
    made = torch.full((len(sizes), 3, height * PATCH, width * PATCH), torch.nan)
    for picture, (h, w) in zip(made, sizes, strict=True):
        picture[:, : h * PATCH, : w * PATCH] = torch.randn(3, h * PATCH, w * PATCH, generator=generator)
    return made.to(device)


def pixels(sizes):
    """Return sizes in pixels, `[images, 2]`."""
    return torch.tensor(sizes) * PATCH


def patch_mask(sizes, padded=None):
    """Return the mask of the patches of such pictures, bool `[images, height, width]`."""
    height, width = padded or map(max, zip(*sizes, strict=True))
    mask = torch.zeros(len(sizes), height, width, dtype=torch.bool)
    for own, (h, w) in zip(mask, sizes, strict=True):
        own[:h, :w] = True
    return mask


GEMMA4 = TINY | {"num_key_value_heads": 4, "position_embedding_size": 64, "pooling_kernel_size": 2}


def patch_positions(sizes, length=0):
    """Return `(x, y)` of the patches of images of these sizes, line by line, and -1 past them."""
    positions = torch.full((len(sizes), length or max(h * w for h, w in sizes), 2), -1)
    for own, (h, w) in zip(positions, sizes, strict=True):
        own[: h * w] = torch.cartesian_prod(torch.arange(h), torch.arange(w)).flip(1)
    return positions


def position_rows(positions, seed=0):
    """Return patches of values between 0 and 1 for these positions, NaN in padding."""
    padding = (positions == -1).all(-1, keepdim=True)
    shape = (*positions.shape[:2], 3 * PATCH * PATCH)
    rows = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(positions.device)
    return rows.masked_fill(padding, torch.nan)
