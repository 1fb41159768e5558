"""Marks, towers and inputs of tests that need a GPU."""

import pytest
import torch

from tests.support.encoders import rows_for
from tests.support.towers import pixels, qwen3_vl_tower


def on_gpus(count=1):
    """Return the marks of tests that need this many CUDA devices."""
    reason = "there is no CUDA device" if count == 1 else f"there are fewer than {count} CUDA devices"
    return [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < count, reason=reason)]


TWO_GPUS = on_gpus(2)[1]
"""Mark of single tests that need two devices."""

LARGER = {"hidden_size": 576, "num_heads": 8, "intermediate_size": 2048, "out_hidden_size": 1024}
"""Sizes of a tower whose graphs take some memory."""


def tower_on_gpu(seed=0, dtype=torch.bfloat16, **changes):
    """Return a tower of Qwen3-VL whose heads are of 72, as in the 8B tower: no power of two."""
    sizes = {"hidden_size": 288, "num_heads": 4, "intermediate_size": 512, "out_hidden_size": 256}
    return qwen3_vl_tower(seed, dtype=dtype, **(sizes | changes)).to("cuda")


def pixels_on_gpu(grid, seed=0, dtype=torch.bfloat16):
    """Return random rows for a grid."""
    return pixels(grid, seed, device="cuda", dtype=dtype)


def rows_on_gpu(lengths, seed=0, dim=16):
    """Return random rows for items of these lengths."""
    return rows_for(lengths, seed, dim, device="cuda")
