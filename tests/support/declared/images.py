"""Towers that take a batch of images of one size."""

import torch
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    MllamaVisionModel,
    SwinConfig,
    SwinModel,
)
from transformers.models.mllama.configuration_mllama import MllamaVisionConfig

import varlen_graphs as vg
from tests.support.declared.case import Case, graphed

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
BATCHES = [1, 2, 4]


def pixels(count, side=32):
    return {"pixel_values": torch.randn(count, 3, side, side)}


def clip(device):
    module = CLIPVisionModel(CLIPVisionConfig(image_size=32, patch_size=8, **SIZES))
    outputs = vg.outputs.Fields(last_hidden_state=vg.outputs.Rows(), pooler_output=vg.outputs.Items())
    encoder = graphed(module, BATCHES, vg.BufferSpec("pixel_values", vg.Batch(), outputs=outputs), device)
    return Case(encoder, [pixels(3), pixels(1), pixels(7)], module)


def layers(device):
    module = CLIPVisionModel(CLIPVisionConfig(image_size=32, patch_size=8, **SIZES))
    outputs = vg.outputs.Fields(
        last_hidden_state=vg.outputs.Rows(), pooler_output=vg.outputs.Items(), hidden_states=vg.outputs.Rows()
    )
    encoder = graphed(module, BATCHES, vg.BufferSpec("pixel_values", vg.Batch(), outputs=outputs), device)
    asking = {"output_hidden_states": True}
    return Case(encoder, [pixels(3) | asking, pixels(7) | asking, pixels(2)], module)


def resolutions(device):
    module = Dinov2Model(Dinov2Config(image_size=32, patch_size=8, **SIZES))
    outputs = vg.outputs.Fields(last_hidden_state=vg.outputs.Rows(), pooler_output=vg.outputs.Items())
    encoder = graphed(module, BATCHES, vg.BufferSpec("pixel_values", vg.Batch(), outputs=outputs), device)
    return Case(encoder, [pixels(3), pixels(2, 48), pixels(1), pixels(5, 48)], module)


def hierarchical(device):
    config = SwinConfig(image_size=32, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4)
    module = SwinModel(config)
    outputs = vg.outputs.Fields(last_hidden_state=vg.outputs.Items(), pooler_output=vg.outputs.Items())
    encoder = graphed(module, BATCHES, vg.BufferSpec("pixel_values", vg.Batch(), outputs=outputs), device)
    return Case(encoder, [pixels(3), pixels(1)], module)


def tiles(device):
    config = MllamaVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_global_layers=1, attention_heads=2,
        image_size=16, patch_size=8, max_num_tiles=4, intermediate_layers_indices=[0], vision_output_dim=64,
        supported_aspect_ratios=[[1, 1], [1, 2], [2, 1], [2, 2]],
    )  # fmt: skip
    module = MllamaVisionModel(config)
    spec = vg.BufferSpec(
        vg.inputs.Rows("pixel_values", (1, 4, 3, 16, 16)),
        vg.Batch(),
        inputs=[
            vg.inputs.PerItem("aspect_ratio_ids", (1,), dtype=torch.int64),
            vg.inputs.PerItem("aspect_ratio_mask", (1, 4), dtype=torch.int64, pad=1),
        ],
    )

    def call(ids):
        of_ratio = torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
        return {
            "pixel_values": torch.randn(len(ids), 1, 4, 3, 16, 16),
            "aspect_ratio_ids": torch.tensor(ids)[:, None],
            "aspect_ratio_mask": of_ratio[ids][:, None],
        }

    encoder = graphed(module, BATCHES, spec, device)
    return Case(encoder, [call([1, 4, 2]), call([3]), call([2, 1, 4, 4, 3])], module)


IMAGES = {
    "images of one size (CLIP, SigLIP, ViT, InternVL tiles)": clip,
    "batches of several sizes (DINOv2)": resolutions,
    "hidden states by layer (LLaVA)": layers,
    "stages that merge patches in windows (Swin)": hierarchical,
    "tiles with aspect ratio and mask (Mllama)": tiles,
}
