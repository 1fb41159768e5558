"""Sizes of the fixed inputs of towers, and of the tensors beside them, by their configurations."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from varlen_graphs.inputs.extra import PerItem
from varlen_graphs.layouts.dtypes import module_dtype
from varlen_graphs.recipes.probe import UnknownCallError

Shape = tuple[int, ...]

INPUTS = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
"""Names that transformers gives to images, videos, spectrograms and sound; the last is also a name of spectrograms."""


def item_shapes(tower: nn.Module, name: str) -> Iterator[Shape]:
    """Yield shapes of one input that a tower may accept, the more specific first.

    Raises:
        UnknownCallError: Nothing tells a fixed size.
    """
    config = getattr(tower, "config", None)
    shapes = list(dict.fromkeys(_pictures(tower, config) if name.startswith("pixel") else _spectrograms(config, name)))
    if not shapes:
        raise UnknownCallError(
            f"its configuration does not tell the fixed size of {name}: inputs of several sizes are no batch; for "
            "one size call vg.recipes.by_batch(tower, shape=...) with the shape of one input"
        )
    yield from shapes


def required_inputs(shape: Shape) -> dict[str, PerItem]:
    """Return declarations of tensors that towers require beside inputs of this shape, by name."""
    if len(shape) != 5:  # images and tiles before channels
        return {}
    ids = PerItem("aspect_ratio_ids", shape[:1], torch.int64)
    return {ids.name: ids, "aspect_ratio_mask": PerItem("aspect_ratio_mask", shape[:2], torch.int64, pad=1)}


def optional_inputs(tower: nn.Module, shape: Shape) -> list[PerItem]:
    """Return declarations of tensors that calls may bring beside inputs of this shape."""
    config: Any = getattr(tower, "config", None)
    frames, patch = _integer(config, "max_source_positions"), _integer(config, "patch_size")
    if len(shape) == 3 and patch:
        sides = shape[1] // patch, shape[2] // patch
        return [PerItem("patch_attention_mask", sides, torch.bool, default=True, pad=True)]
    if len(shape) != 2 or not frames:
        return []
    # For SDPA, transformers 5 makes masks of booleans; otherwise a mask is added to the scores.
    makes_booleans = hasattr(sys.modules[type(tower).__module__], "create_bidirectional_mask")
    if makes_booleans and getattr(config, "_attn_implementation", None) == "sdpa":
        return [PerItem("attention_mask", (1, frames, frames), torch.bool, default=True)]
    return [PerItem("attention_mask", (1, frames, frames), module_dtype(tower), default=0.0)]


def _pictures(tower: nn.Module, config: Any) -> Iterator[Shape]:
    convolutions = (part for part in tower.modules() if isinstance(part, nn.Conv2d | nn.Conv3d))
    first = next((part.in_channels for part in convolutions), 3)
    channels = _integer(config, "num_channels", "in_channels", "in_chans") or first
    sides = _sides(config)
    image = (channels, *sides)
    frames = _integer(config, "num_frames", "frames_per_clip", "temporal_patch_size")
    if frames:
        yield frames, *image
    if tiles := _integer(config, "max_num_tiles"):
        yield 1, tiles, *image
    yield image
    patch = _integer(config, "patch_size")
    if patch:  # patches in rows
        yield (sides[0] // patch) * (sides[1] // patch), channels * patch * patch
    if config is None:  # a part of a model, such as the encoder of a tokenizer, whose images have any size
        yield 4, channels, 32, 32


def _sides(config: Any) -> tuple[int, int]:
    inner = (getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
    sizes = (getattr(part, name, None) for part in (config, *inner) for name in ("image_size", "crop_size"))
    size = next(filter(None, sizes), 224)
    if isinstance(size, Mapping):
        size = [size.get(side) or size.get("shortest_edge") or 224 for side in ("height", "width")]
    if isinstance(size, list | tuple):
        return int(size[0]), int(size[-1])
    return int(size), int(size)


def _spectrograms(config: Any, name: str) -> Iterator[Shape]:
    bins = _integer(config, "num_mel_bins", "feature_size")
    frames = _integer(config, "max_source_positions", "max_position_embeddings")
    length = _integer(config, "max_length")
    if bins and length and name == "input_values":
        yield length, bins
    elif bins and frames and name == "input_features":
        yield bins, 2 * frames  # of two convolutions, the second with a stride of 2
        yield bins, frames
        yield frames, bins


def _integer(config: Any, *names: str) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)
