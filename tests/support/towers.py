"""Small towers with random weights, and inputs for them."""

import importlib

import pytest
import torch

import varlen_graphs as vg

FAMILIES = {
    "qwen3_vl": ("qwen3_vl", "Qwen3VLVisionConfig", "Qwen3VLVisionModel"),
    "qwen3_vl_moe": ("qwen3_vl_moe", "Qwen3VLMoeVisionConfig", "Qwen3VLMoeVisionModel"),
    "qwen3_5": ("qwen3_5", "Qwen3_5VisionConfig", "Qwen3_5VisionModel"),
    "qwen3_5_moe": ("qwen3_5_moe", "Qwen3_5MoeVisionConfig", "Qwen3_5MoeVisionModel"),
    "qwen3_omni": ("qwen3_omni_moe", "Qwen3OmniMoeVisionEncoderConfig", "Qwen3OmniMoeVisionEncoder"),
}
"""Package, configuration class and tower class of transformers, by family of vision towers."""

GLM = {
    "glm4v": ("glm4v", "Glm4vVisionConfig", "Glm4vVisionModel"),
    "glm4v_moe": ("glm4v_moe", "Glm4vMoeVisionConfig", "Glm4vMoeVisionModel"),
    "glm_ocr": ("glm_ocr", "GlmOcrVisionConfig", "GlmOcrVisionModel"),
    "glm5_next": ("glm5_next", "Glm5NextVisionConfig", "Glm5NextVisionModel"),
}
"""Towers of GLM, likewise."""

AUDIO = {"qwen3_omni_audio": ("qwen3_omni_moe", "Qwen3OmniMoeAudioEncoderConfig", "Qwen3OmniMoeAudioEncoder")}
"""Audio towers, likewise."""

QWEN2 = {
    "qwen2_vl": ("qwen2_vl", "Qwen2VLVisionConfig", "Qwen2VisionTransformerPretrainedModel"),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VLVisionConfig", "Qwen2_5_VisionTransformerPretrainedModel"),
    "qwen2_5_omni": ("qwen2_5_omni", "Qwen2_5OmniVisionEncoderConfig", "Qwen2_5OmniVisionEncoder"),
}
"""Older vision towers, likewise."""

PADDED = {"siglip2": ("siglip2", "Siglip2VisionConfig", "Siglip2VisionModel")}
"""Vision towers that take padded batches, likewise."""

NO_DEEPSTACK = ("qwen3_5", "qwen3_5_moe")

TINY = {
    "depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 4, "out_hidden_size": 96,
    "num_position_embeddings": 64, "deepstack_visual_indexes": [1, 2],
}  # fmt: skip

ROW = 3 * 2 * 4 * 4

TINY_WINDOWED = {
    "depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 4, "out_hidden_size": 96,
    "window_size": 24, "fullatt_block_indexes": [1, 3],
}  # fmt: skip
"""Windows of 3 x 3 merged tokens."""

TINY_QWEN2 = {"depth": 4, "embed_dim": 64, "hidden_size": 96, "mlp_ratio": 2, "num_heads": 4, "patch_size": 4}
TINY_GLM = {
    "depth": 3, "hidden_size": 64, "intermediate_size": 160, "num_heads": 4, "image_size": 32, "patch_size": 4,
    "out_hidden_size": 96,
}  # fmt: skip

TINY_AUDIO = {
    "num_mel_bins": 16, "encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "d_model": 32,
    "output_dim": 24, "downsample_hidden_size": 8, "n_window": 50, "n_window_infer": 200, "conv_chunksize": 7,
}  # fmt: skip


TINY_SIGLIP2 = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_patches": 25,
    "patch_size": 4,
}  # fmt: skip


def tower_classes(family):
    """Return the configuration and tower class of a family; skip the test where transformers has none."""
    package, config, model = (FAMILIES | QWEN2 | GLM | AUDIO | PADDED)[family]
    folder = f"transformers.models.{package}"
    modeling = pytest.importorskip(f"{folder}.modeling_{package}", reason=f"this transformers has no {package}")
    return getattr(importlib.import_module(f"{folder}.configuration_{package}"), config), getattr(modeling, model)


def qwen3_vl_tower(seed=0, dtype=torch.float32, family="qwen3_vl", **changes):
    """Return a tower whose outputs are not small: default weights would hide errors under absolute tolerances."""
    config, model = tower_classes(family)
    torch.manual_seed(seed)
    tiny = {
        name: value for name, value in TINY.items() if name != "deepstack_visual_indexes" or family not in NO_DEEPSTACK
    }
    return _enlarged(model._from_config(config(**(tiny | changes)), dtype=dtype))


def qwen2_tower(seed=0, dtype=torch.float32, family="qwen2_5_vl", **changes):
    """Return such a tower of an older family."""
    config, model = tower_classes(family)
    torch.manual_seed(seed)
    tiny = TINY_QWEN2 if family == "qwen2_vl" else TINY_WINDOWED
    return _enlarged(model._from_config(config(**(tiny | changes)), dtype=dtype))


def qwen2_recipe(tower):
    """Return the recipe of an older family."""
    return vg.recipes.qwen2_5_vl if hasattr(tower, "window_size") else vg.recipes.qwen2_vl


def glm4v_tower(seed=0, dtype=torch.float32, family="glm4v", **changes):
    """Return such a tower of GLM."""
    config, model = tower_classes(family)
    torch.manual_seed(seed)
    return _enlarged(model._from_config(config(**(TINY_GLM | changes)), dtype=dtype))


def qwen3_omni_audio_tower(seed=0, dtype=torch.float32, **changes):
    """Return such a tower for audio."""
    config, model = tower_classes("qwen3_omni_audio")
    torch.manual_seed(seed)
    return _enlarged(model._from_config(config(**(TINY_AUDIO | changes)), dtype=dtype))


def siglip2_tower(seed=0, dtype=torch.float32, **changes):
    """Return such a tower of padded batches; its default weights are not small."""
    config, model = tower_classes("siglip2")
    torch.manual_seed(seed)
    return _enlarged(model._from_config(config(**(TINY_SIGLIP2 | changes)), dtype=dtype), by=2)


def _enlarged(tower, by=4):
    with torch.no_grad():
        for parameter in tower.parameters():
            if parameter.dim() > 1:
                parameter.mul_(by)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return tower.eval()


class Adapted(torch.nn.Module):
    """An adapter in the place of a layer: it has the layer's weight, if there is one, and changes its output."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.weight = getattr(base_layer, "weight", None)

    def forward(self, x):
        return self.base_layer(x) * 2 + 1


def adapt(module, path, adapter=Adapted):
    """Put an adapter in the place of the layer at a path."""
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, adapter(module.get_submodule(path)))


def original_of(tower):
    """Return a function of rows and a grid that runs a tower without an encoder."""

    def run(rows, grid):
        with torch.no_grad():
            return tower(rows, grid_thw=torch.tensor(grid, device=rows.device))

    return run


def frames(grid):
    """Return each frame as an image of its own, as `get_video_features` of whole models does for GLM."""
    return [(1, h, w) for t, h, w in grid for _ in range(t)]


def original_by_frame(tower):
    """Return the same for GLM, whose videos come frame by frame."""
    original = original_of(tower)
    return lambda rows, grid: original(rows.to(tower.dtype), frames(grid))


def pixels(grid, seed=0, row=ROW, device="cpu", dtype=torch.float32):
    """Return random rows for a grid."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(t * h * w for t, h, w in grid)
    return torch.randn(count, row, generator=generator).to(device, dtype)


def tensors(output):
    """Return all tensors of an output, by name."""
    if isinstance(output, torch.Tensor):
        return {"": output}
    if output is None:
        return {}
    items = output.items() if hasattr(output, "items") else enumerate(output)
    return {f"{name}{'.' if inner else ''}{inner}": t for name, part in items for inner, t in tensors(part).items()}


def pooled(output):
    """Return the merged rows of a tower's output, which is a tuple or a tensor on transformers 4.57."""
    if isinstance(output, torch.Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output.pooler_output


def distance(got, expected):
    """Return the relative L2 error of an output, the worst of its tensors; infinite where something is not finite."""
    got, expected = tensors(got), tensors(expected)
    assert got.keys() == expected.keys()
    worst = 0.0
    for name, tensor in got.items():
        assert tensor.shape == expected[name].shape, name
        value = ((tensor.double() - expected[name].double()).norm() / expected[name].double().norm()).item()
        worst = max(worst, value) if value == value else float("inf")
    return worst


def equal_bits(a, b):
    """Return True if two outputs are the same bit for bit."""
    a, b = tensors(a), tensors(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
