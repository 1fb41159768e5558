"""Small vision towers that read their grid on the host: Cosmos 3 Edge, GLM-Image, HunYuan-VL, LFM3-VL, VideoLLaMA 3."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import varlen_graphs as vg
from benchmarks.generic import enlarge
from tests.support.towers import pixels

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4,
}  # fmt: skip


class Family(NamedTuple):
    """Package, configuration class, tower class and settings of a family; the pixels of a patch; a whole model."""

    package: str
    config: str
    tower: str
    settings: dict[str, Any]
    row: int
    whole: str
    path: str


FAMILIES = {
    "cosmos3_edge": Family(
        "cosmos3_edge", "Cosmos3EdgeVisionConfig", "Cosmos3EdgeVisionModel", {"num_patches": 25}, 48,
        "Cosmos3EdgeForConditionalGeneration", "model.visual",
    ),
    "glm_image": Family(
        "glm_image", "GlmImageVisionConfig", "GlmImageVisionModel",
        {"depth": 3, "num_heads": 2, "hidden_size": 32, "intermediate_size": 64, "image_size": 20}, 48,
        "GlmImageForConditionalGeneration", "model.visual",
    ),
    "hunyuan_vl": Family(
        "hunyuan_vl", "HunYuanVLVisionConfig", "HunYuanVLVisionTransformer",
        {"max_image_size": 28, "text_hidden_size": 24}, 48, "HunYuanVLForConditionalGeneration", "model.vision_tower",
    ),
    "lfm3_vl": Family(
        "lfm3_vl", "Lfm3VlVisionConfig", "Lfm3VlVisionModel",
        {"num_key_value_heads": 1, "layer_types": ["conv", "full_attention", "conv"]}, 96,
        "Lfm3VlForConditionalGeneration", "model.vision_tower",
    ),
    "video_llama3": Family(
        "video_llama_3", "VideoLlama3VisionConfig", "VideoLlama3VisionModel", {}, 48,
        "VideoLlama3ForConditionalGeneration", "model.vision_model",
    ),
}  # fmt: skip


IMAGES_ONLY = ("glm_image", "hunyuan_vl")
"""Families whose towers take no videos."""


def grid_tower(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """Return a tower with random weights; skip the test where transformers has none."""
    one = FAMILIES[family]
    folder = f"transformers.models.{one.package}"
    modeling = pytest.importorskip(f"{folder}.modeling_{one.package}", reason=f"this transformers has no {family}")
    config = getattr(importlib.import_module(f"{folder}.configuration_{one.package}"), one.config)
    torch.manual_seed(seed)
    tower = getattr(modeling, one.tower)._from_config(config(**SIZES | one.settings | changes), dtype=dtype)
    enlarge(tower)
    return tower.eval()


def recipe_of(family: str) -> Callable[..., vg.GraphedEncoder]:
    return getattr(vg.recipes, family)


def taken(family: str, grid: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return the items with as many frames as a tower takes."""
    return [(1, h, w) for _, h, w in grid] if family in IMAGES_ONLY else grid


def beside(family: str, grid: list[tuple[int, int, int]], device: str = "cpu") -> dict[str, Any]:
    """Return what calls bring beside the rows and the grid: every other item of VideoLLaMA 3 keeps its patches."""
    if family != "video_llama3":
        return {}
    return {"merge_sizes": torch.tensor([2 - at % 2 for at in range(len(grid))], device=device)}


def rows_of(family: str, **options: Any) -> Callable[..., torch.Tensor]:
    def rows(grid: list[tuple[int, int, int]], seed: int = 0) -> torch.Tensor:
        return pixels(grid, seed, row=FAMILIES[family].row, **options)

    return rows


def original_of(tower: Any, family: str) -> Callable[..., Any]:
    """Return a function of rows and a grid that runs a tower without an encoder."""

    def run(rows: torch.Tensor, grid: list[tuple[int, int, int]], **asked: Any) -> Any:
        device = rows.device.type
        with torch.no_grad():
            own = rows.to(next(tower.parameters()).dtype)
            return tower(own, grid_thw=torch.tensor(grid, device=device), **beside(family, grid, device), **asked)

    return run
