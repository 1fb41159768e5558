"""Tiny models with random weights, loaded by vLLM's own loader."""

import json

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from vllm.config import LoadConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models.glm4_1v import Glm4vForConditionalGeneration
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.transformers import TransformersMultiModalForCausalLM
from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

NATIVE = (Qwen2_5_VLForConditionalGeneration, Qwen3VLForConditionalGeneration, Glm4vForConditionalGeneration)
KINDS = ("qwen2_5_vl", "qwen3_vl", "glm4v")
BUDGETS = [64, 128, 256]
TAPE = {"backend": "tape", "budgets": BUDGETS}

_set_torch_accelerator_to_noop()  # as vLLM's model runner for CPUs does

# The registry imports classes in another process, unless they are given to it.
for cls in (*NATIVE, TransformersMultiModalForCausalLM):
    ModelRegistry.register_model(cls.__name__, cls)

TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 200, "bos_token_id": 0, "eos_token_id": 1,
    "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default"},
}  # fmt: skip
VISION = {
    "depth": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "in_channels": 3, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32,
}  # fmt: skip
PATCHES = {
    "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 4096},
}  # fmt: skip
QWEN_TOKENS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
GLM_TOKENS = ["<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"]
QWEN_IDS = {"image_token_id": 150, "video_token_id": 151, "vision_start_token_id": 152, "vision_end_token_id": 153}
GLM_IDS = {"image_token_id": 150, "video_token_id": 151, "image_start_token_id": 152, "image_end_token_id": 153}


def write_model(kind, folder):
    """Write the configuration, tokenizer and processors of a tiny model."""
    if kind == "qwen2_5_vl":
        vision = VISION | {"window_size": 32, "fullatt_block_indexes": [1]}
        config = transformers.Qwen2_5_VLConfig(text_config=TEXT, vision_config=vision, **QWEN_IDS)
        tokens, processors = QWEN_TOKENS, ("Qwen2_5_VL", "Qwen2VL", "Qwen2VL")
    elif kind == "qwen3_vl":
        vision = VISION | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        config = transformers.Qwen3VLConfig(text_config=TEXT | {"head_dim": 8}, vision_config=vision, **QWEN_IDS)
        tokens, processors = QWEN_TOKENS, ("Qwen3VL", "Qwen2VL", "Qwen3VL")
    else:
        text = TEXT | {"hidden_size": 64, "pad_token_id": 0}  # rotates half of the channels of a head
        vision = VISION | {"image_size": 32, "out_hidden_size": 64}
        config = transformers.Glm4vConfig(text_config=text, vision_config=vision, **GLM_IDS)
        tokens, processors = GLM_TOKENS, ("Glm4v", "Glm4v", "Glm4v")
    config.architectures = [NATIVE[KINDS.index(kind)].__name__]
    config.save_pretrained(folder)
    write_tokenizer(folder, tokens)
    processor, images, videos = processors
    # vLLM normalises bytes in the tower where the processor would.
    normalize = {"image_mean": [0.5] * 3, "image_std": [0.3] * 3, "do_normalize": True} if kind == "qwen3_vl" else {}
    image = {"processor_class": f"{processor}Processor", "image_processor_type": f"{images}ImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(PATCHES | normalize | image))
    (folder / "video_preprocessor_config.json").write_text(
        json.dumps(PATCHES | {"video_processor_type": f"{videos}VideoProcessor"})
    )
    return folder


def write_llava(folder):
    """Write a tiny LLaVA with SigLIP, whose tower has no recipe."""
    vision = transformers.SiglipVisionConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    )
    text = {name: value for name, value in TEXT.items() if name != "rope_scaling"}
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**text), image_token_index=150
    )
    config.architectures = ["LlavaForConditionalGeneration"]
    config.save_pretrained(folder)
    write_tokenizer(folder, ["<image>"])
    side = {"height": 32, "width": 32}
    size = {"size": side, "crop_size": side, "image_processor_type": "CLIPImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(size | {"processor_class": "LlavaProcessor"}))
    processor = {"patch_size": 8, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 0}
    (folder / "processor_config.json").write_text(json.dumps(processor | {"processor_class": "LlavaProcessor"}))
    return folder


def write_tokenizer(folder, tokens):
    words = {f"word{i}": i for i in range(150)} | {token: 150 + i for i, token in enumerate(tokens)} | {"<unk>": 154}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), unk_token="<unk>",
        additional_special_tokens=tokens,
    ).save_pretrained(folder)  # fmt: skip


def engine_config(folder, switch=None, *, ranks=1, worker="auto", engine=None, **model):
    """Return the configuration of an engine; `switch` is its entry `varlen_graphs` of `additional_config`."""
    options = {"dtype": "float32", "max_model_len": 512, "seed": 0} | model
    additional = {} if switch is None else {"varlen_graphs": switch}
    backend = "mp" if ranks > 1 else None
    parallel = ParallelConfig(tensor_parallel_size=ranks, distributed_executor_backend=backend, worker_cls=worker)
    return VllmConfig(
        model_config=ModelConfig(model=str(folder), **options), load_config=LoadConfig(load_format="dummy"),
        parallel_config=parallel, additional_config=additional, **(engine or {}),
    )  # fmt: skip


def load(config):
    """Load a model; two of the same kind have the same weights."""
    with set_current_vllm_config(config):
        model = get_model(vllm_config=config)
    for index, parameter in enumerate(model.parameters()):
        parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(index))
    return model


def start_groups(folder, rank, ranks):
    """Start vLLM's process groups over gloo."""
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(ranks, rank, f"file://{folder}/store", rank, "gloo")
        initialize_model_parallel(ranks)


def rows_of(model, grid, seed=0):
    """Return random patches of a grid: bytes if the model normalises them itself."""
    rows = sum(t * h * w for t, h, w in grid)
    generator = torch.Generator().manual_seed(seed)
    if model.model_config.multimodal_config.mm_device_do_normalize:
        return torch.randint(256, (rows, 96), dtype=torch.uint8, generator=generator)
    return torch.randn(rows, 96, generator=generator)
