"""Tiny whole models with random weights, and prompts for them, ids made by hand."""

import importlib
import inspect

import pytest
import torch

from tests.towers import NO_DEEPSTACK, ROW

IMAGE, VIDEO, START, END, AUDIO, AUDIO_START, AUDIO_END, WORDS = 190, 191, 192, 193, 194, 195, 196, 180
"""Ids of the tokens for images, videos and sound, of what begins and ends them, and how many words there are."""

VISION = {
    "depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 4, "out_hidden_size": 64,
    "num_position_embeddings": 64, "deepstack_visual_indexes": [1, 2],
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

OMNI = {
    "audio_config": HEARING, "audio_token_id": AUDIO, "audio_start_token_id": AUDIO_START,
    "audio_end_token_id": AUDIO_END,
}  # fmt: skip

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
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
}  # fmt: skip
"""The package of transformers, its classes of configuration and model, and what its language model needs beside."""


def whole_model(family="qwen3_vl", dtype=torch.float32, device="cpu"):
    """A model whose tokens depend on what it sees: default weights would hardly let them."""
    package, config_name, model_name, extra = WHOLE[family]
    folder = f"transformers.models.{package}"
    modeling = pytest.importorskip(f"{folder}.modeling_{package}", reason=f"this transformers has no {package}")
    configuration = importlib.import_module(f"{folder}.configuration_{package}")
    vision = {k: v for k, v in VISION.items() if k != "deepstack_visual_indexes" or family not in NO_DEEPSTACK}
    rope = {"rope_parameters": MROPE, "rope_scaling": MROPE}  # the second name is that of transformers 4.57
    config = getattr(configuration, config_name)(
        **(OMNI if family == "qwen3_omni" else {}),
        text_config={**TEXT, **rope, **extra},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    torch.manual_seed(0)
    model = getattr(modeling, model_name)._from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.to(device)


def prompt(model, images=(), videos=(), clips=(), seed=0):
    """What a processor gives for some words, images and videos `(t, h, w)`, and clips of so many frames of sound."""
    arguments = inspect.signature(model.forward).parameters
    timed = "video_second_per_grid" in arguments  # a video is one block of tokens for Omni, and one a frame elsewhere
    ids = [1, 2]
    for token, grids in ((IMAGE, images), (VIDEO, videos)):
        for t, h, w in grids:
            blocks, frames = (1, t) if timed else (t, 1)
            ids += [*([START, *[token] * (frames * h * w // 4), END] * blocks), 5]
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
    """What the model generates after a prompt, greedily."""
    return model.generate(**inputs, max_new_tokens=count, do_sample=False)[:, inputs["input_ids"].shape[1] :]


def scores(model, inputs, count=8):
    """What a model generates, and the scores it chose by, `[count, vocabulary]`."""
    options = {"max_new_tokens": count, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    generated = model.generate(**inputs, **options)
    return generated.sequences[0, inputs["input_ids"].shape[1] :], torch.cat(generated.scores).float()
