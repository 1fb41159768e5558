"""Run the vision tower of CLIP as CUDA graphs, or on the tape if there is no GPU, for callers that select a layer.

LLaVA and its like call their tower with `output_hidden_states=True`, and take one layer of what it returns.
"""

import torch
from transformers import CLIPVisionConfig, CLIPVisionModel

import varlen_graphs as vg


def graph(tower, **options):
    spec = vg.BufferSpec(
        rows="pixel_values",
        layout=vg.Batch(),
        outputs=vg.outputs.Fields(
            last_hidden_state=vg.outputs.Rows(), pooler_output=vg.outputs.Items(), hidden_states=vg.outputs.Rows()
        ),
    )
    return vg.GraphedEncoder(tower, [1, 2, 4, 8], spec, **options)


def image_features(tower, pixel_values, layer=-2):
    """Return the patches of a layer, `[images, patches, hidden]`, without the class token."""
    return tower(pixel_values, output_hidden_states=True).hidden_states[layer][:, 1:]


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, image_size=56, patch_size=14
    )
    tower = CLIPVisionModel(config).to(device).eval()
    encoder = graph(tower, backend="cuda" if device == "cuda" else "tape")

    difference = 0.0
    for images in (3, 11, 1):  # in one replay, or in several
        pixel_values = torch.randn(images, 3, 56, 56, device=device)
        with torch.no_grad():
            for layer in (-2, -1, 0):
                features, eager = (image_features(run, pixel_values, layer) for run in (encoder, tower))
                difference = max(difference, (features - eager).abs().max().item())
    print(f"features {list(features.shape)}", encoder)
    print("largest difference from eager:", difference)
