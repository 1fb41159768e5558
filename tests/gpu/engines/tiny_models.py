"""Folders of tiny models with random weights, of shapes that the kernels of engines take."""

import json

import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

TEXT = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 256, "bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 4096,
}  # fmt: skip
ROPE = {"rope_scaling": {"mrope_section": [8, 12, 12], "rope_type": "default"}}
VISION = {
    "depth": 3, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "in_channels": 3, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 128,
}  # fmt: skip
SIGLIP = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 2}
MEANS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
PATCHES = MEANS | {
    "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "size": {"shortest_edge": 4096, "longest_edge": 262144},
}  # fmt: skip
QWEN_TOKENS = {"image": "<|image_pad|>", "video": "<|video_pad|>", "begin": "<|vision_start|>", "end": "<|vision_end|>"}
GLM_TOKENS = {
    "image": "<|image|>", "video": "<|video|>", "begin": "<|begin_of_image|>", "end": "<|end_of_image|>",
    "begin_video": "<|begin_of_video|>", "end_video": "<|end_of_video|>",
}  # fmt: skip
IDS = {"image_token_id": 150, "video_token_id": 151}
QWEN_IDS = IDS | {"vision_start_token_id": 152, "vision_end_token_id": 153}
GLM_IDS = IDS | {"image_start_token_id": 152, "image_end_token_id": 153}

IMAGES = {
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "glm4v": "<|begin_of_image|><|image|><|end_of_image|>",
    "llava": "<image>",
    "gemma3": "<start_of_image>",
}
"""What stands for an image in a prompt, by the kind of model."""

VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


def write_model(kind, folder):
    """Write the configuration, weights, tokenizer and processors of a tiny model."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _WRITERS[kind](folder)
    torch.manual_seed(0)
    model = getattr(transformers, config.architectures[0])(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # those of an initialisation make all answers alike
            torch.nn.init.normal_(parameter, std=0.05)
    model.to(torch.bfloat16).save_pretrained(folder)


def _qwen2_5_vl(folder):
    vision = VISION | {"window_size": 128, "fullatt_block_indexes": [1]}
    config = transformers.Qwen2_5_VLConfig(text_config=TEXT | ROPE, vision_config=vision, **QWEN_IDS)
    _write_patches(folder, QWEN_TOKENS, "Qwen2_5_VL", "Qwen2VL", "Qwen2VL")
    return _named(config, "Qwen2_5_VLForConditionalGeneration")


def _qwen3_vl(folder):
    vision = VISION | {"num_position_embeddings": 256, "deepstack_visual_indexes": [0]}
    text = TEXT | ROPE | {"head_dim": 64}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **QWEN_IDS)
    _write_patches(folder, QWEN_TOKENS, "Qwen3VL", "Qwen2VL", "Qwen3VL")
    return _named(config, "Qwen3VLForConditionalGeneration")


def _glm4v(folder):
    rope = ROPE["rope_scaling"] | {"partial_rotary_factor": 1.0}
    text = TEXT | {"rope_scaling": rope, "head_dim": 64, "pad_token_id": 0}
    config = transformers.Glm4vConfig(text_config=text, vision_config=VISION | {"image_size": 320}, **GLM_IDS)
    _write_patches(folder, GLM_TOKENS, "Glm4v", "Glm4v", "Glm4v")
    return _named(config, "Glm4vForConditionalGeneration")


def _llava(folder):
    vision = transformers.SiglipVisionConfig(**SIGLIP, image_size=96, patch_size=16)
    text = transformers.LlamaConfig(**TEXT, head_dim=64)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=150, vision_feature_select_strategy="full"
    )
    _write_tokenizer(folder, additional_special_tokens=["<image>"])
    side = {"height": 96, "width": 96}
    images = {"size": side, "crop_size": side, "image_processor_type": "CLIPImageProcessor"}
    _write(folder, "preprocessor_config.json", images | {"processor_class": "LlavaProcessor"})
    processor = {"patch_size": 16, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 0}
    _write(folder, "processor_config.json", processor | {"processor_class": "LlavaProcessor"})
    return _named(config, "LlavaForConditionalGeneration")


def _gemma3(folder):
    vision = transformers.SiglipVisionConfig(**SIGLIP, image_size=128, patch_size=16, vision_use_head=False)
    text = TEXT | {"head_dim": 64, "sliding_window": 512, "pad_token_id": 0}
    tokens = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    config = transformers.Gemma3Config(
        vision_config=vision, text_config=text, mm_tokens_per_image=16, image_token_index=150, boi_token_index=151,
        eoi_token_index=152,
    )  # fmt: skip
    _write_tokenizer(folder, extra_special_tokens=tokens)
    images = MEANS | {"size": {"height": 128, "width": 128}, "image_processor_type": "Gemma3ImageProcessor"}
    _write(folder, "preprocessor_config.json", images | {"processor_class": "Gemma3Processor"})
    _write(folder, "processor_config.json", {"image_seq_length": 16, "processor_class": "Gemma3Processor"})
    return _named(config, "Gemma3ForConditionalGeneration")


_WRITERS = {"qwen2_5_vl": _qwen2_5_vl, "qwen3_vl": _qwen3_vl, "glm4v": _glm4v, "llava": _llava, "gemma3": _gemma3}


def _named(config, name):
    config.architectures, config.dtype = [name], "bfloat16"
    return config


def _write_patches(folder, tokens, processor, images, videos):
    _write_tokenizer(folder, additional_special_tokens=[*tokens.values()])
    by = PATCHES | {"processor_class": f"{processor}Processor"}
    _write(folder, "preprocessor_config.json", by | {"image_processor_type": f"{images}ImageProcessor"})
    _write(folder, "video_preprocessor_config.json", by | {"video_processor_type": f"{videos}VideoProcessor"})


def _write_tokenizer(folder, **special):
    (tokens,) = special.values()
    tokens = tokens if isinstance(tokens, list) else [*tokens.values()]
    words = {f"word{i}": i for i in range(150)} | {token: 150 + i for i, token in enumerate(tokens)}
    words |= {"\n" * count: 160 + count for count in range(1, 5)} | {"<unk>": 160}
    words |= {f"more{i}": i for i in range(256) if i not in {*words.values()}}
    core = Tokenizer(WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", pad_token="word0", **special
    ).save_pretrained(folder)


def _write(folder, name, value):
    (folder / name).write_text(json.dumps(value))
