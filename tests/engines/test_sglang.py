"""The released SGLang's own towers, with and without graphs: `make test-engines`.

Its Python files run as they are, on a CPU: without its compiled kernels, which need a GPU, its layers take their native
forwards, and its vision attention the backend `sdpa`.
"""

import functools
import importlib.util
import inspect
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import varlen_graphs as vg
from tests.support.segments import relative

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang 0.5.23: make test-engines", allow_module_level=True)

import sglang
from sglang.srt.distributed import parallel_state
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models.glm4v import Glm4vVisionModel
from sglang.srt.models.glm_ocr import GlmOcrVisionModel
from sglang.srt.multimodal.mm_utils import run_dp_sharded_mrope_vision_model
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_exec

from tests.engines.sglang_towers import MODELS, TOWERS, WIDTH, calls_of, load_model, make_tower, randomize, start
from varlen_graphs.engines.sglang import encoders, graph_towers, register
from varlen_graphs.engines.sglang import plugin as varlen_graphs_plugin
from varlen_graphs.errors import CaptureError


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory):
    """Start SGLang as a scheduler with one rank does, on a CPU, and let it load its plugins."""
    start(tmp_path_factory.mktemp("sglang") / "store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_PLUGINS", "varlen_graphs")
        load_plugins()
        yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


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


def test_groups_of_ranks_which_layers_hold_are_the_engines_own(monkeypatch):
    tower = make_tower("qwen3_vl")
    encoder = graph_towers(tower, [64, 256], backend="tape")[""]
    x, grid = next(calls_of("qwen3_vl"))
    expected = tower(x, grid_thw=grid)
    monkeypatch.setattr(parallel_state.get_tp_group(), "unique_name", "another")
    encoder.check()
    assert torch.equal(tower(x, grid_thw=grid), expected)
    assert encoder.executor.store.losses == 0


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
    assert caplog.text.count("a call of Qwen3VLMoeVisionModel runs eager") == 1


@pytest.mark.parametrize("error", [CaptureError("no room"), torch.OutOfMemoryError("no room")])
def test_graphs_that_cannot_be_captured_again_are_given_up(error, monkeypatch, caplog):
    tower = make_tower("qwen3_vl")
    encoder = graph_towers(tower, [64, 256], backend="tape")[""]
    layer = tower.blocks[0].attn.proj
    layer.weight = torch.nn.Parameter(layer.weight * 2)

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(encoder.executor.store, "capture", fail)
    monkeypatch.setattr(encoder.executor.store, "usable", fail)
    for x, grid in calls_of("qwen3_vl"):
        assert torch.equal(tower(x, grid), encoder.module(x, grid))
    assert not encoders(tower)
    assert caplog.text.count("Qwen3VLMoeVisionModel runs eager from now on: no room") == 1


def test_towers_are_graphed_once():
    tower = make_tower("qwen3_vl")
    assert graph_towers(tower, [64], backend="tape") == graph_towers(tower, [64, 256], backend="tape")


def test_another_version_of_sglang_is_left_alone(monkeypatch, caplog):
    monkeypatch.setattr(sglang, "__version__", "0.6.0")
    with mock.patch.object(HookRegistry, "register") as hooks, envs.SGLANG_PLUGINS.override("varlen_graphs"):
        register()
        hooks.assert_not_called()
    assert "varlen_graphs does nothing: SGLang is 0.6.0, expected 0.5.23" in caplog.text


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
    assert "the towers of Qwen3VLForConditionalGeneration run eager: the weights of" in caplog.text  # they are on a CPU
    assert not encoders(model)

    def loaded(model, **state):
        state = {"is_draft_worker": False, "startup_weight_load": None} | state
        varlen_graphs_plugin.after_initialize(SimpleNamespace(model=model, **state))
        return caplog.text

    assert "the towers of Linear run eager: Linear has no vision tower" in loaded(torch.nn.Linear(2, 2))
    assert "try --startup-weight-load-mode serial" in loaded(model, startup_weight_load=object())
    assert {one.levelname for one in caplog.records if "run eager" in one.getMessage()} == {"ERROR"}


def test_two_ranks_replay_graphs_of_their_own_and_sharded_towers_are_refused(tmp_path):
    environment = os.environ | {"SGLANG_PLUGINS": "varlen_graphs"}
    code = "from tests.engines import torchvision_operators, sglang_rank; sglang_rank.run"
    store = str(tmp_path / "store")
    ranks = [
        subprocess.Popen([sys.executable, "-c", f"{code}({rank}, {store!r})"], env=environment) for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()


def test_graphs_of_the_engine_itself_must_be_off():
    tower = make_tower("qwen3_vl")
    with (
        envs.SGLANG_VIT_ENABLE_CUDA_GRAPH.override(True),
        pytest.raises(vg.errors.SpecError, match="expected them off"),
    ):
        graph_towers(tower, [64], backend="tape")
    assert not encoders(tower)


@pytest.mark.parametrize("option", [{"enable_deterministic_inference": True}, {"rl_on_policy_target": "fsdp"}])
def test_promised_bits_are_not_put_at_risk(option):
    tower = make_tower("qwen3_vl")
    with get_exec().deterministic.override(**option), pytest.raises(vg.errors.SpecError, match="the same bits"):
        graph_towers(tower, [64], backend="tape")


def test_towers_of_other_classes_are_left_alone():
    assert issubclass(GlmOcrVisionModel, Glm4vVisionModel)
    tower = GlmOcrVisionModel.__new__(GlmOcrVisionModel)
    torch.nn.Module.__init__(tower)
    with pytest.raises(vg.errors.SpecError, match="GlmOcrVisionModel has no vision tower that can be graphed"):
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
