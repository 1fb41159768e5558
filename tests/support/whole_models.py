"""Tiny whole models with random weights, and prompts for them, ids made by hand."""

import importlib
import inspect

import pytest
import torch

from tests.support.towers import NO_DEEPSTACK, ROW

IMAGE, VIDEO, START, END, AUDIO, AUDIO_START, AUDIO_END, WORDS = 190, 191, 192, 193, 194, 195, 196, 180
"""Ids of the tokens for images, videos and sound, of what begins and ends them, and how many words there are."""

VIDEO_START, VIDEO_END = 197, 198
"""Ids of what begins and ends a video of GLM, whose frames are made of the tokens for images."""

VISION = {
    "depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 4, "out_hidden_size": 64,
    "num_position_embeddings": 64, "deepstack_visual_indexes": [1, 2],
}  # fmt: skip

WINDOWED = {
    "depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 4, "out_hidden_size": 64,
    "window_size": 24, "fullatt_block_indexes": [1, 3],
}  # fmt: skip

OTHER_VISION = {
    "qwen2_vl": {
        "depth": 4, "embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 4, "patch_size": 4,
    },
    "qwen2_5_vl": WINDOWED,
    "qwen2_5_omni": WINDOWED,
}  # fmt: skip
"""Vision towers that are not of the kind of Qwen3-VL's."""

GLM_VISION = {
    "depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 4, "out_hidden_size": 64,
    "image_size": 32,
}  # fmt: skip

TEXT = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "max_position_embeddings": 256,
}  # fmt: skip

HEARING = {
    "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128, "output_dim": 64,
    "num_mel_bins": 16, "downsample_hidden_size": 16, "max_source_positions": 200, "n_window": 50,
    "n_window_infer": 200,
}  # fmt: skip

OMNI_FAMILIES = ("qwen3_omni", "qwen2_5_omni")

OMNI = {
    "audio_config": HEARING, "audio_token_id": AUDIO, "audio_start_token_id": AUDIO_START,
    "audio_end_token_id": AUDIO_END,
}  # fmt: skip

GLM_IDS = {
    "image_start_token_id": START, "image_end_token_id": END, "video_start_token_id": VIDEO_START,
    "video_end_token_id": VIDEO_END,
}  # fmt: skip

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GLM_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "partial_rotary_factor": 1.0,
}  # fmt: skip
GLM5 = {
    **GLM_EXPERTS, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16,
    "qk_nope_head_dim": 16, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 64, "linear_head_dim": 16,
    "linear_num_heads": 4, "layer_types": ["linear_attention", "full_attention", "full_attention"],
}  # fmt: skip
LINEAR = {
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}

WHOLE = {
    "qwen3_vl": ("qwen3_vl", "Qwen3VLConfig", "Qwen3VLForConditionalGeneration", {}),
    "qwen3_vl_moe": ("qwen3_vl_moe", "Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration", EXPERTS),
    "qwen3_5": ("qwen3_5", "Qwen3_5Config", "Qwen3_5ForConditionalGeneration", LINEAR),
    "qwen3_5_moe": (
        "qwen3_5_moe", "Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration",
        EXPERTS | LINEAR | {"shared_expert_intermediate_size": 64},
    ),
    "qwen3_omni": (
        "qwen3_omni_moe", "Qwen3OmniMoeThinkerConfig", "Qwen3OmniMoeThinkerForConditionalGeneration", EXPERTS,
    ),
    "qwen2_vl": ("qwen2_vl", "Qwen2VLConfig", "Qwen2VLForConditionalGeneration", {}),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration", {}),
    "qwen2_5_omni": (
        "qwen2_5_omni", "Qwen2_5OmniThinkerConfig", "Qwen2_5OmniThinkerForConditionalGeneration", {},
    ),
    "glm4v": ("glm4v", "Glm4vConfig", "Glm4vForConditionalGeneration", {}),
    "glm46v": ("glm46v", "Glm46VConfig", "Glm46VForConditionalGeneration", {}),
    "glm4v_moe": ("glm4v_moe", "Glm4vMoeConfig", "Glm4vMoeForConditionalGeneration", GLM_EXPERTS),
    "glm_ocr": ("glm_ocr", "GlmOcrConfig", "GlmOcrForConditionalGeneration", {}),
    "glm5_next": ("glm5_next", "Glm5NextConfig", "Glm5NextForConditionalGeneration", GLM5),
}  # fmt: skip
"""The package of transformers, its classes of configuration and model, and what its language model needs beside."""


def whole_model(family="qwen3_vl", dtype=torch.float32, device="cpu"):
    """A model whose tokens depend on what it sees: default weights would hardly let them."""
    package, config_name, model_name, extra = WHOLE[family]
    folder = f"transformers.models.{package}"
    modeling = pytest.importorskip(f"{folder}.modeling_{package}", reason=f"this transformers has no {package}")
    configuration = importlib.import_module(f"{folder}.configuration_{package}")
    vision = {k: v for k, v in VISION.items() if k != "deepstack_visual_indexes" or family not in NO_DEEPSTACK}
    glm = family.startswith("glm")
    vision = GLM_VISION if glm else OTHER_VISION.get(family, vision)
    rope = {"rope_parameters": {**MROPE}, "rope_scaling": {**MROPE}}  # the second name is that of transformers 4.57
    config = getattr(configuration, config_name)(
        **(OMNI if family in OMNI_FAMILIES else {}),
        **(GLM_IDS if glm else {"vision_start_token_id": START, "vision_end_token_id": END}),
        text_config={**TEXT, **rope, **extra},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    torch.manual_seed(0)
    model = getattr(modeling, model_name)._from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.to(device)


def mixes(model):
    """Return True if a prompt may have images and videos at once: GLM has one token for both, and counts each against all."""
    return not hasattr(model.config, "video_start_token_id")


def prompts(model, images, videos):
    """A prompt with images, one with videos, and one with both where the model takes that."""
    both = [prompt(model, images[1:], videos)] if mixes(model) else []
    return [prompt(model, images), prompt(model, videos=videos), *both]


def prompt(model, images=(), videos=(), clips=(), seed=0):
    """Return the inputs a processor makes of words, images and videos `(t, h, w)`, and clips of so many frames of sound."""
    arguments = inspect.signature(model.forward).parameters
    timed = "video_second_per_grid" in arguments
    one_block = timed or model.config.model_type.startswith("qwen2")  # elsewhere a video has a block of tokens a frame
    glm = not mixes(model)
    ids = [1, 2]
    for token, grids in ((IMAGE, images), (VIDEO, videos)):
        for t, h, w in grids:
            blocks, frames = (1, t) if one_block else (t, 1)
            seen = [START, *[token] * (frames * h * w // 4), END] * blocks
            ids += [*([VIDEO_START, *seen, VIDEO_END] if glm and token == VIDEO else seen), 5]
    for frames in clips:
        heard = frames // 100 * 13 + -(-(frames % 100) // 8)
        ids += [AUDIO_START, *[AUDIO] * heard, AUDIO_END]
    ids = torch.tensor([ids])
    generator = torch.Generator().manual_seed(seed)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if clips:
        sound = torch.randn(len(clips), HEARING["num_mel_bins"], max(clips), generator=generator)
        inputs["input_features"] = sound.to(model.dtype)
        inputs["feature_attention_mask"] = torch.arange(max(clips)) < torch.tensor(clips)[:, None]
    if timed and videos:
        inputs["video_second_per_grid"] = torch.ones(len(videos))
    if "mm_token_type_ids" in arguments:
        inputs["mm_token_type_ids"] = (ids == IMAGE).long() + 2 * (ids == VIDEO).long()
    if glm:
        ids[ids == VIDEO] = IMAGE
    for rows, grid, grids in (
        ("pixel_values", "image_grid_thw", images),
        ("pixel_values_videos", "video_grid_thw", videos),
    ):
        if grids:
            count = sum(t * h * w for t, h, w in grids)
            inputs[rows] = torch.randn(count, ROW, generator=generator).to(model.dtype)
            inputs[grid] = torch.tensor(grids)
    return {name: value.to(model.device) for name, value in inputs.items()}


def tokens(model, inputs, count=8):
    """Return the tokens a model generates greedily after a prompt."""
    return model.generate(**inputs, max_new_tokens=count, do_sample=False)[:, inputs["input_ids"].shape[1] :]


def scores(model, inputs, count=8):
    """Return the tokens a model generates greedily, and their scores `[count, vocabulary]`."""
    options = {"max_new_tokens": count, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    generated = model.generate(**inputs, **options)
    return generated.sequences[0, inputs["input_ids"].shape[1] :], torch.cat(generated.scores).float()
