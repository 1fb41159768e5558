"""Vision towers of packed rows, and the sites that reading their source shows.

Calls have equally many rows and other items. A `consequence` is what follows from a site, and may be named or not: what
a branch runs that is listed itself, a number that the tensor before it has as a size, or a loop over the entries of a
tensor, which are as many in a graph as in its budget.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.generic import build
from tests.doctor.corpus.shared import (
    CU_SEQLENS,
    FRAMES,
    IDS,
    INTERPOLATION,
    LOOP,
    NEAREST,
    POSITION_IDS,
    RESHAPED,
    TIME,
    VISION,
    WINDOW_INDEX,
    attention,
)  # fmt: skip
from tests.doctor.corpus.sites import Site, sites

Made = tuple[nn.Module, list[dict[str, Any]]]


@dataclass(frozen=True)
class Tower:
    """A tower with calls, its sites, and what follows from them."""

    make: Callable[[], Made]
    sites: Sequence[Site]
    consequences: Sequence[Site] = ()


IMAGES = [[[1, 8, 8], [1, 4, 8]], [[1, 4, 4], [1, 8, 10]], [[1, 4, 4], [1, 4, 4], [1, 8, 8]], [[1, 16, 6]]]
VIDEOS = [*IMAGES[:3], [[2, 4, 4], [1, 8, 8]]]
ALIKE = [*IMAGES[:3], [[2, 4, 4], [2, 4, 8]]]
"""Layouts of 96 rows. Kimi's are images, or videos of one length."""


def grids(
    name: str, layouts: list[list[list[int]]], *shape: int, grid: str = "grid_thw", **more: Any
) -> Callable[[], Made]:
    """Return what makes a tower and a call for each layout. Its first argument takes the rows."""

    def make() -> Made:
        tower = build(name)
        rows = "hidden_states" if name in STATES else "pixel_values"
        generator = torch.Generator().manual_seed(0)
        calls = []
        for at, layout in enumerate(layouts):
            given = torch.tensor(layout)
            call = {
                rows: torch.randn(shape, generator=generator),
                grid: given[:, 1:] if grid == "target_sizes" else given,
            }
            calls.append(call | {key: value[at] for key, value in more.items()})
        return tower, calls

    return make


STATES = {
    "CohereCompassVisionModel", "Ernie4_5_VLMoeVisionTransformerPretrainedModel", "Exaone4_5_VisionModel",
    "Glm4vVisionModel", "Glm5NextVisionModel", "GlmOcrVisionModel", "Qwen2VisionTransformerPretrainedModel",
    "Qwen2_5OmniVisionEncoder", "Qwen2_5_VisionTransformerPretrainedModel", "Qwen3OmniMoeVisionEncoder",
    "Qwen3VLVisionModel", "Qwen3_5VisionModel", "Qwen4ExpVisionModel",
}  # fmt: skip

QWEN2 = POSITION_IDS + FRAMES + CU_SEQLENS
QWEN3 = INTERPOLATION + QWEN2
IMAGES_ONLY = POSITION_IDS + CU_SEQLENS


def windows(name: str) -> tuple[Site, ...]:
    """Return the sites of window attention: the index lies on the host."""
    return (
        *WINDOW_INDEX,
        *sites(f"{name}.permute_input_for_window_attn", "input_tensor = input_tensor[window_index, :, :]"),
        *sites(f"{name}.forward", "merged_hidden_states = merged_hidden_states[reverse_indices, :]"),
    )


def images_of_one_size() -> Made:
    """Step3p7 takes images of one size a call."""
    generator = torch.Generator().manual_seed(0)
    return build("Step3p7VisionModel"), [
        {"pixel_values": torch.randn(2, 3, 32, 48, generator=generator)} for _ in range(3)
    ]


KIMI = "transformers.models.kimi_k25.modeling_kimi_k25"
MUSE = "transformers.models.muse_glimmer.modeling_muse_glimmer"

TOWERS: dict[str, Tower] = {
    "CohereCompass": Tower(
        grids("CohereCompassVisionModel", VIDEOS, 96, 96), QWEN3 + attention("CohereCompassVisionAttention")
    ),
    "Cosmos3 Edge": Tower(
        grids("Cosmos3EdgeVisionModel", VIDEOS, 96, 48),
        (
            *sites(
                "Cosmos3EdgeVisionEmbeddings.resize_positional_embeddings",
                "for temporal, height, width in grid_thw.tolist():",
                "resized_embeddings = F.interpolate(",
                "position_chunks.append(resized_embeddings.repeat(temporal, 1))",
            ),
            *CU_SEQLENS,
            *attention("Cosmos3EdgeVisionAttention", "attn_output = torch.cat(["),
        ),
        sites(
            "Cosmos3EdgeVisionEmbeddings.resize_positional_embeddings",
            "resized_embeddings = resized_embeddings.reshape(",
            "resized_embeddings = resized_embeddings.transpose(1, 2).reshape(",
        ),
    ),
    "Dots3 Note": Tower(
        grids("Dots3NoteVisionModel", VIDEOS, 96, 48), QWEN2 + attention("Dots3NoteVisionAttention")
    ),
    "Ernie 4.5 VL": Tower(
        grids("Ernie4_5_VLMoeVisionTransformerPretrainedModel", VIDEOS, 96, 48),
        QWEN2 + attention("Ernie4_5_VLMoeVisionAttention"),
    ),
    "Exaone 4.5": Tower(
        grids("Exaone4_5_VisionModel", VIDEOS, 96, 96),
        QWEN2 + windows("Exaone4_5_VisionModel") + attention("Exaone4_5_VisionAttention"),
    ),
    "GLM-4.1V": Tower(grids("Glm4vVisionModel", IMAGES, 96, 96), IMAGES_ONLY + attention("Glm4vVisionAttention")),
    "GLM-5 Next": Tower(grids("Glm5NextVisionModel", VIDEOS, 96, 96), QWEN2 + attention("Glm5NextVisionAttention")),
    "GLM-Image": Tower(grids("GlmImageVisionModel", IMAGES, 96, 48), IMAGES_ONLY + attention("GlmImageVisionAttention")),
    "GLM-OCR": Tower(grids("GlmOcrVisionModel", VIDEOS, 96, 96), QWEN2 + attention("GlmOcrVisionAttention")),
    "HunYuan-VL": Tower(
        grids("HunYuanVLVisionTransformer", IMAGES, 96, 48),
        (
            *sites(
                "HunYuanVLVisionTransformer.forward",
                "split_sizes = grid_thw.prod(dim=-1).tolist()",
                "split_items = torch.split(hidden_states, split_sizes, dim=1)",
                "for grid, item in zip(grid_thw.tolist(), split_items):",
            ),
            *sites("HunYuanVLVisionPatchMerger.forward", "hidden_states.shape[1], *size)"),
            *sites(
                "HunYuanVLVisionPatchEmbed.interpolate_pos_encoding",
                "patch_pos_embed = nn.functional.interpolate(",
            ),
            *sites(
                "HunYuanVLVisionPatchEmbed.forward",
                "self.interpolate_pos_encoding(embeddings, h, w).squeeze(0).repeat(t, 1)",
            ),
            *CU_SEQLENS,
            *attention("HunYuanVLVisionAttention"),
        ),
        sites("HunYuanVLVisionPatchEmbed.forward", "for t, h, w in grid_thw:"),
    ),
    "Inkling 2": Tower(
        grids(
            "Inkling2VisionModel",
            [[[1, 4, 4], [1, 2, 4]], [[1, 2, 2], [1, 4, 5]], [[1, 2, 2], [1, 2, 2], [1, 4, 4]], [[2, 2, 2], [1, 4, 4]]],
            24, 8, 8, 3, grid="image_grid_thw",
        ),
        (
            *sites(
                "Inkling2VisionModel.forward",
                "patch_grid_thw = image_grid_thw.cpu()",
                "patch_index = patch_index.to(device, non_blocking=True)",
                "position_ids = get_vision_position_ids(",
            ),
            *sites(
                "Inkling2VisionEmbeddings.forward",
                "interp_indices = interp_indices.to(",
                "interp_weights = interp_weights.to(",
            ),
            *attention("Inkling2VisionAttention", LOOP),
        ),
        sites(
            "Inkling2VisionEmbeddings.forward", "cls_embedding.repeat(patch_embeddings.shape[0] + patch_grid_thw.shape[0]"
        ),
    ),
    "Kimi-K2.5": Tower(
        grids("Kimi_K25VisionModel", ALIKE, 96, 3, 4, 4),
        (
            *INTERPOLATION, *POSITION_IDS, *FRAMES,
            *sites(
                "get_vision_frame_index",
                "for t, h, w in grid_thw.tolist():",
                "frames = torch.arange(t, device=device)",
                "parts.append(frames.repeat_interleave(h * w))",
            ),
            *sites(
                "get_vision_temporal_merge_index",
                "for t, h, w in grid_thw.tolist():",
                "base = torch.arange(running, running + t * h * w",
            ),
            *attention("Kimi_K25VisionAttention"),
        ),
        sites("get_vision_temporal_merge_index", "base = base.permute("),
    ),
    "LFM3-VL": Tower(
        grids("Lfm3VlVisionModel", VIDEOS, 96, 96),
        (
            *QWEN2,
            *sites("Lfm3VlVisionModel.forward", "grid_thw_list = grid_thw.tolist()"),
            *sites(
                "Lfm3VlVisionShortConv.forward",
                "in zip(torch.split(gated, lengths, dim=0), grid_thw):",
                "frames = frames.view(temporal, height // merge, width // merge, merge, merge, channels)",
            ),
            *attention("Lfm3VlVisionAttention", LOOP),
        ),
        sites(
            "Lfm3VlVisionShortConv.forward",
            "frames = frames.permute(",
            "frames = frames.view(temporal, channels,",
            "conv_outputs.append(",
        ),
    ),
    "MiniCPM-V 4.6": Tower(
        grids("MiniCPMV4_6VisionModel", IMAGES, 1, 3, 4, 384, grid="target_sizes"),
        (
            *NEAREST, *WINDOW_INDEX,
            *sites(
                "MiniCPMV4_6ViTWindowAttentionMerger.forward",
                "window_index = window_index.to(device)",
                "torch_compilable_check(",  # the message is formatted in any case, and holds a tensor
            ),
            *attention("MiniCPMV4_6VisionAttention"),
        ),
        sites("get_vision_nearest_position_ids", "pos_ids_list.append(", file=VISION),
    ),
    "MiniMax-M3": Tower(
        grids("MiniMaxM3VLVisionModel", VIDEOS, 96, 96),
        POSITION_IDS + TIME + attention("MiniMaxM3VLVisionAttention", LOOP),
    ),
    "Muse Glimmer": Tower(
        grids("MuseGlimmerVisionModel", VIDEOS, 96, 96),
        (
            *INTERPOLATION, *QWEN2, *WINDOW_INDEX,
            *sites(
                "MuseGlimmerVisionModel.forward",
                "hidden_states = hidden_states[window_index, :]",
                "position_ids = position_ids[window_index, :]",
                "hidden_states = hidden_states[reverse_indices, :]",
            ),
            *sites(
                "get_vision_pixel_shuffle_index",
                "for frames, height, width in grid_thw.tolist():",
                "permutation = torch.arange(height * width",
                "permutation = permutation.view(",
                "indices.append(permutation + offset)",
            ),
            *sites("get_vision_pixel_shuffle_index", "if frames > 1:", with_body=True),
            *attention("MuseGlimmerVisionAttention"),
        ),
    ),
    "PaddleOCR-VL": Tower(
        grids("PaddleOCRVisionModel", VIDEOS, 1, 96, 3, 4, 4), QWEN3 + attention("PaddleOCRVisionAttention", LOOP)
    ),
    "Qwen2-VL": Tower(grids("Qwen2VisionTransformerPretrainedModel", VIDEOS, 96, 96), QWEN2 + attention("VisionAttention")),
    "Qwen2.5-Omni vision": Tower(
        grids("Qwen2_5OmniVisionEncoder", VIDEOS, 96, 96),
        QWEN2 + windows("Qwen2_5OmniVisionEncoder") + attention("Qwen2_5OmniVisionAttention"),
    ),
    "Qwen2.5-VL": Tower(
        grids("Qwen2_5_VisionTransformerPretrainedModel", VIDEOS, 96, 96),
        QWEN2 + windows("Qwen2_5_VisionTransformerPretrainedModel") + attention("Qwen2_5_VLVisionAttention"),
    ),
    "Qwen3-Omni vision": Tower(
        grids("Qwen3OmniMoeVisionEncoder", VIDEOS, 96, 96), QWEN3 + attention("Qwen3OmniMoeVisionAttention")
    ),
    "Qwen3-VL": Tower(grids("Qwen3VLVisionModel", VIDEOS, 96, 96), QWEN3 + attention("Qwen3VLVisionAttention")),
    "Qwen3.5": Tower(grids("Qwen3_5VisionModel", VIDEOS, 96, 96), QWEN3 + attention("Qwen3_5VisionAttention")),
    "Qwen4 Exp": Tower(grids("Qwen4ExpVisionModel", VIDEOS, 96, 96), QWEN3 + attention("Qwen4ExpVisionAttention")),
    "Step 3.7": Tower(
        images_of_one_size,
        (
            *sites("Step3p7VisionModel.forward", "grid_thw = torch.tensor([[1, grid_h, grid_w]], device="),
            *POSITION_IDS[:2],
        ),
        POSITION_IDS[2:],
    ),
    "VideoLLaMA 3": Tower(
        grids(
            "VideoLlama3VisionModel", VIDEOS, 96, 48,
            merge_sizes=[torch.tensor(sizes) for sizes in ([2, 2], [2, 2], [2, 2, 2], [2, 1])],
        ),
        (
            *IDS, *RESHAPED, *FRAMES, *CU_SEQLENS,
            *sites(
                "VideoLlama3VisionModel.pixel_unshuffle",
                "hidden_states_chunks = hidden_states.split(grid_thw.prod(dim=1).tolist(), dim=0)",
                "hidden_states = hidden_states.view(t, h // merge_size",
                "hidden_states = hidden_states.reshape(t, h, w, c)",
                "hidden_states = torch.nn.functional.interpolate(",
            ),
            *attention("VideoLlama3VisionAttention", LOOP),
        ),
        sites("VideoLlama3VisionModel.pixel_unshuffle", "for hidden_states, (t, h, w), merge_size in zip("),
    ),
}  # fmt: skip
