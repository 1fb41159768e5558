"""The released SGLang's own towers, with and without graphs: `make test-engines`.

Its Python files run as they are, on a CPU: without its compiled kernels, which need a GPU, its layers take their native
forwards, and its vision attention the backend `sdpa`.
"""

import functools
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import varlen_graphs as vg
from tests.support.segments import relative

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang 0.5.23: make test-engines", allow_module_level=True)

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.qwen3_vl import Qwen3VLVisionConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.environ import envs
from sglang.srt.layers.rotary_embedding import base as rotary_embedding
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models.glm4v import Glm4vVisionModel
from sglang.srt.models.glm_ocr import GlmOcrVisionModel
from sglang.srt.models.qwen2_5_vl import Qwen2_5_VisionTransformer
from sglang.srt.models.qwen3_vl import Qwen3VLMoeVisionModel
from sglang.srt.multimodal.mm_utils import run_dp_sharded_mrope_vision_model
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import SpawnRanks, get_exec, publish
from sglang.srt.server_args import ServerArgs
from sglang.test.parallel_groups import parallel_scope
from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

from varlen_graphs.engines.sglang import encoders, graph_towers, register
from varlen_graphs.engines.sglang import plugin as varlen_graphs_plugin

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


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory):
    """Start SGLang as a scheduler with one rank does, on a CPU, and let it load its plugins."""
    configure("none")
    store = tmp_path_factory.mktemp("sglang") / "store"
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=f"file://{store}"
    )
    parallel_state.initialize_model_parallel(backend="gloo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_PLUGINS", "varlen_graphs")
        load_plugins()
        yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def configure(model_path):
    """Publish the arguments of a server, as a scheduler does."""
    arguments = ServerArgs(
        model_path=str(model_path), device="cpu", dtype="float32", load_format="dummy", skip_tokenizer_init=True,
        attention_backend="torch_native", mm_attention_backend="sdpa",
    )  # fmt: skip
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))
    return arguments


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


@pytest.mark.parametrize("name", MODELS)
def test_whole_models_replay_graphs_from_the_moment_they_are_loaded(name, tmp_path, monkeypatch):
    on_tape = functools.partial(graph_towers, budgets=[64, 256], backend="tape")
    monkeypatch.setattr(varlen_graphs_plugin, "graph_towers", on_tape)
    model = load_model(name, tmp_path)
    encoder = encoders(model)["visual"]
    assert len(encoder.executor.store) == 2
    randomize(model.visual)  # in place, as updates of weights are

    def item(kind, layout):
        rows = torch.randn(layout[0] * layout[1] * layout[2], 3 * 2 * 14 * 14)
        grid = {f"{kind.name.lower()}_grid_thw": torch.tensor([layout])}
        return MultimodalDataItem(modality=kind, feature=rows, model_specific_data=grid)

    images = [item(Modality.IMAGE, layout) for layout in [(1, 8, 12), (1, 4, 6)]]
    video = item(Modality.VIDEO, (2, 4, 6))
    expected = encoder.module(torch.cat([one.feature for one in images]), torch.tensor([(1, 8, 12), (1, 4, 6)]))
    assert relative(model.get_image_feature(images), expected) < 1e-5
    frames = torch.tensor([(1, 4, 6)] * 2 if name == "glm4v" else [(2, 4, 6)])
    assert relative(model.get_video_feature([video]), encoder.module(video.feature, frames)) < 1e-5
    assert encoder.stats.replays == {encoder.budgets[1]: 1, encoder.budgets[0]: 1}
    assert not encoder.stats.eager


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


@pytest.mark.parametrize("name", TOWERS)
def test_outputs_are_those_of_the_tower_and_graphs_replay(name):
    tower = make_tower(name)
    expected = [tower(x, grid_thw=grid) for x, grid in calls_of(name)]
    encoder = graph_towers(tower, [64, 256], backend="tape")[""]
    before = len(encoder.executor.store)

    for (x, grid), wanted in zip(calls_of(name), expected, strict=True):
        got = tower(x, grid_thw=grid)
        assert got.shape == wanted.shape
        assert relative(got, wanted) < 1e-5
    assert encoder.stats.replays == {encoder.budgets[0]: 3, encoder.budgets[1]: 2}
    assert not encoder.stats.eager
    assert len(encoder.executor.store) == before == 2  # all graphs were there before the first call


@pytest.mark.parametrize("name", TOWERS)
def test_bfloat16_is_as_exact_as_the_tower_itself(name):
    graphed = own = 0.0
    for seed in range(8):
        exact, tower = make_tower(name, seed=seed), make_tower(name, torch.bfloat16, seed=seed)
        calls = [*calls_of(name, torch.bfloat16, seed)]
        wanted = [exact(x.float(), grid_thw=grid) for x, grid in calls]
        own += sum(float(relative(tower(*call).float(), right)) for call, right in zip(calls, wanted, strict=True))
        encoder = graph_towers(tower, [256], backend="tape")[""]
        graphed += sum(float(relative(tower(*call).float(), right)) for call, right in zip(calls, wanted, strict=True))
        assert encoder.stats.replays.total() == len(calls)
    assert graphed <= 1.1 * own


@pytest.mark.parametrize("name", TOWERS)
def test_padding_does_not_leak(name):
    tower = make_tower(name)
    encoder = graph_towers(tower, [64, 256], backend="tape")[""]
    verified = encoder.verify([{"x": x, "grid_thw": grid} for x, grid in calls_of(name)])
    assert verified


def test_what_no_budget_holds_runs_eager():
    tower = make_tower("qwen2_5_vl")
    x, grid = torch.randn(256, WIDTH), torch.tensor([(1, 16, 16)])
    expected = tower(x, grid)
    encoder = graph_towers(tower, [64], backend="tape")[""]
    assert relative(tower(x, grid), expected) < 1e-5
    assert encoder.stats.eager.total() == 1
    assert not encoder.stats.replays


@pytest.mark.parametrize("name", TOWERS)
def test_the_encoder_of_data_parallel_ranks_replays_graphs(name):
    tower = make_tower(name, use_data_parallel=True)
    encoder = graph_towers(tower, [64, 256], backend="tape")[""]
    for x, grid in calls_of(name):
        got = run_dp_sharded_mrope_vision_model(tower, x, grid.tolist(), rope_type="rope_3d")
        assert relative(got, encoder.module(x, grid)) < 1e-5
    assert encoder.stats.replays.total() == 5
    assert not encoder.stats.eager


def test_what_graphs_refuse_goes_to_the_tower_itself(caplog):
    tower = make_tower("qwen3_vl")
    x, side = torch.randn(4, WIDTH), 2 * len(tower.rotary_pos_emb.cos_sin_cache)
    encoder = graph_towers(tower, [64], backend="tape")[""]
    with pytest.raises(IndexError):  # the tower's own answer to an image beyond its table of rotations
        tower(torch.randn(2 * side, WIDTH), torch.tensor([(1, 2, side)]))
    with pytest.raises(RuntimeError, match="size of tensor a"):  # and to rows that do not match the grid
        tower(x, torch.tensor([(1, 2, 6)]))
    assert encoder.stats.eager == {"a call that its graphs refuse": 2}
    assert caplog.text.count("runs the tower itself") == 1


def test_names_in_the_state_dict_stay():
    model = torch.nn.Module()
    model.visual = make_tower("qwen3_vl")
    names = [*model.state_dict()]
    assert encoders(model) == {}
    made = graph_towers(model, [64], backend="tape")
    assert [*made] == ["visual"]
    assert encoders(model) == made
    assert [*model.state_dict()] == names


def test_what_cannot_be_graphed_is_served_as_it_is(tmp_path, caplog):
    model = load_model("qwen3_vl", tmp_path)
    assert "Qwen3VLForConditionalGeneration is served as it is: the weights of" in caplog.text  # they are on a CPU
    assert not encoders(model)

    def loaded(model, **state):
        state = {"is_draft_worker": False, "startup_weight_load": None} | state
        varlen_graphs_plugin.after_initialize(None, SimpleNamespace(model=model, **state))
        return caplog.text

    assert "Linear is served as it is: Linear has no vision tower" in loaded(torch.nn.Linear(2, 2))
    assert "try --startup-weight-load-mode serial" in loaded(model, startup_weight_load=object())


@pytest.mark.parametrize("name", TOWERS)
def test_sharded_towers_are_refused(name):
    ranks = {"tp_rank": 0, "attn_tp_rank": 0, "tp_size": 2, "attn_tp_size": 2, "moe_tp_size": 2}
    with parallel_scope(**ranks):
        tower = make_tower(name)
        whole = make_tower(name, use_data_parallel=True)
    assert graph_towers(whole, [64], backend="tape")
    with pytest.raises(vg.SpecError, match=r"sharded over 2 ranks.* try --mm-enable-dp-encoder"):
        graph_towers(tower, [64], backend="tape")


def test_graphs_of_the_engine_itself_must_be_off():
    tower = make_tower("qwen3_vl")
    with envs.SGLANG_VIT_ENABLE_CUDA_GRAPH.override(True), pytest.raises(vg.SpecError, match="expected them off"):
        graph_towers(tower, [64], backend="tape")
    assert not encoders(tower)


@pytest.mark.parametrize("option", [{"enable_deterministic_inference": True}, {"rl_on_policy_target": "fsdp"}])
def test_promised_bits_are_not_put_at_risk(option):
    tower = make_tower("qwen3_vl")
    with get_exec().deterministic.override(**option), pytest.raises(vg.SpecError, match="the same bits"):
        graph_towers(tower, [64], backend="tape")


def test_towers_of_other_classes_are_left_alone():
    assert issubclass(GlmOcrVisionModel, Glm4vVisionModel)
    tower = GlmOcrVisionModel.__new__(GlmOcrVisionModel)
    torch.nn.Module.__init__(tower)
    with pytest.raises(vg.SpecError, match="GlmOcrVisionModel has no vision tower that can be graphed"):
        graph_towers(tower, [64], backend="tape")


def test_hooks_are_registered_once():
    hooked = [*(tower.forward for tower, *_ in TOWERS.values()), ModelRunner.initialize]
    assert all(inspect.unwrap(one) is not one for one in hooked)  # by load_plugins, which found the entry point
    assert all(one.__wrapped__ is inspect.unwrap(one) for one in hooked)
    with mock.patch.object(HookRegistry, "register") as again:
        register()
        again.assert_not_called()


def test_without_its_name_in_sglang_plugins_nothing_is_hooked():
    code = (
        "from tests.engines import torchvision_operators\n"
        "from unittest import mock; from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "from varlen_graphs.engines.sglang import register\n"
        "with mock.patch.object(HookRegistry, 'register') as hooks: register()\n"
        "print(hooks.call_count)"
    )
    for named, expected in (("", "0"), ("another", "0"), ("another, varlen_graphs", "4")):
        environment = os.environ | {"SGLANG_PLUGINS": named}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert run.stdout.split()[-1] == expected


def test_importing_the_package_imports_no_engine_and_starts_no_cuda():
    code = (
        "import sys, varlen_graphs, varlen_graphs.engines.sglang, torch\n"
        "assert not any(name.partition('.')[0] == 'sglang' for name in sys.modules)\n"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
