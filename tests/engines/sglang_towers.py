"""SGLang on a CPU, with tiny towers and models of its own: import after it was found to be installed."""

import json
from contextlib import contextmanager
from unittest import mock

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.qwen3_vl import Qwen3VLVisionConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.rotary_embedding import base as rotary_embedding
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models.glm4v import Glm4vVisionModel
from sglang.srt.models.qwen2_5_vl import Qwen2_5_VisionTransformer
from sglang.srt.models.qwen3_vl import Qwen3VLMoeVisionModel
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

WIDTH = 3 * 2 * 4 * 4
SMALL = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "out_hidden_size": 24}
TOWERS = {
    "qwen2_5_vl": (
        Qwen2_5_VisionTransformer,
        Qwen2_5_VLVisionConfig,
        {"window_size": 32, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": (
        Qwen3VLMoeVisionModel,
        Qwen3VLVisionConfig,
        {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
    ),
    "glm4v": (Glm4vVisionModel, Glm4vVisionConfig, {"image_size": 16}),
}
LAYOUTS = [[(1, 4, 8)], [(1, 8, 12), (1, 4, 4), (2, 4, 6)], [(1, 4, 4)], [(3, 8, 8), (1, 2, 2)], [(1, 2, 2)]]
"""Small, larger, smaller: images of several sizes, and videos."""


def configure(model_path, rank=0, **options):
    """Publish the arguments of a server, as a scheduler does."""
    arguments = ServerArgs(
        model_path=str(model_path), device="cpu", dtype="float32", load_format="dummy", skip_tokenizer_init=True,
        attention_backend="torch_native", mm_attention_backend="sdpa", **options,
    )  # fmt: skip
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank))
    return arguments


def start(store, rank=0, ranks=1, **options):
    """Start SGLang as a scheduler of one of several ranks does."""
    configure("none", rank, tp_size=ranks, **options)
    parallel_state.init_distributed_environment(
        world_size=ranks, rank=rank, local_rank=rank, backend="gloo", distributed_init_method=f"file://{store}"
    )
    parallel_state.initialize_model_parallel(backend="gloo")


def randomize(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1 + 0.1 * noise)


@contextmanager
def rotations_without_kernels():
    """Elsewhere than on devices that it knows, SGLang's table of rotations asks for a kernel that no tower runs."""
    with mock.patch.dict(vars(rotary_embedding), _is_cpu=True):
        yield


def make_tower(name, dtype=torch.float32, seed=0, **options):
    """Return a tiny tower with random weights, built as SGLang builds it for a model of this dtype."""
    tower_class, config_class, changes = TOWERS[name]
    config = config_class(**SMALL, **changes)
    config.num_dummy_heads = 0  # what the models of GLM add to their configuration
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with rotations_without_kernels():
            tower = tower_class(config, **options).eval()
    finally:
        torch.set_default_dtype(before)
    randomize(tower, seed)
    return tower


def layouts_of(name):
    """Return layouts as SGLang passes them: to GLM, each frame of a video is an image."""
    if name != "glm4v":
        return LAYOUTS
    return [[(1, h, w) for t, h, w in layout for _ in range(t)] for layout in LAYOUTS]


def calls_of(name, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for layout in layouts_of(name):
        rows = sum(t * h * w for t, h, w in layout)
        yield torch.randn(rows, WIDTH, generator=generator).to(dtype), torch.tensor(layout)


TEXT = {
    "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
}  # fmt: skip
MODELS = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "glm4v": "Glm4vForConditionalGeneration",
}


def load_model(name, folder):
    """Load a whole model as a scheduler does, by a `ModelRunner`, with patches of 14 x 14 pixels."""
    changes = TOWERS[name][2] | {"patch_size": 14}
    changes |= {key: changes[key] * 4 for key in ("window_size", "image_size") if key in changes}
    config = {
        "model_type": name, "architectures": [MODELS[name]], "image_token_id": 97, "video_token_id": 98,
        "dtype": "float32", "text_config": TEXT, "vision_config": SMALL | changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    arguments = configure(folder)
    with rotations_without_kernels():
        runner = ModelRunner(
            ModelConfig.from_server_args(arguments), mem_fraction_static=0.5, gpu_id=0, nccl_port=0,
            server_args=arguments,
        )  # fmt: skip
    return runner.model
