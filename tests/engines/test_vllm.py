"""vLLM's own towers and attention, from its released wheel, with and without the library."""

import logging
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from varlen_graphs.errors import SpecError

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engines")

import tests.engines.vllm_setup  # noqa: F401

# isort: split
from vllm.config import CompilationConfig, set_current_vllm_config
from vllm.config.lora import LoRAConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.models.vision import run_dp_sharded_mrope_vision_model
from vllm.plugins import load_plugins_by_group
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.import_utils import PlaceholderModule
from vllm.v1.worker.worker_base import WorkerWrapperBase

from tests.engines.vllm_models import (
    BUDGETS,
    KINDS,
    TAPE,
    engine_config,
    load,
    rows_of,
    start_groups,
    write_llava,
    write_model,
)
from tests.support.ranks import ROOT, run_group
from tests.support.towers import distance
from varlen_graphs.calls import assemble
from varlen_graphs.engines.vllm import register
from varlen_graphs.engines.vllm.graphed import graph_towers
from varlen_graphs.engines.vllm.settings import read_settings

TOLERANCE = 1e-5
GRIDS = (
    [(1, 4, 6), (1, 8, 4)],
    [(1, 10, 12), (3, 4, 4), (1, 2, 2), (1, 6, 2)],  # more items, a video among them, in a larger graph
    [(1, 2, 2)],
    [(1, 16, 16)],
    [(2, 12, 8), (1, 8, 12)],  # two replays
)

register()


@pytest.fixture(scope="module", autouse=True)
def groups(tmp_path_factory):
    start_groups(tmp_path_factory.mktemp("groups"), rank=0, ranks=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: write_model(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def pairs(folders):
    """Models without the library, and with it, by kind."""
    made = {}

    def pair(kind):
        if kind not in made:
            on = engine_config(folders[kind], TAPE)
            made[kind] = load(engine_config(folders[kind])), load(on)
            with set_current_vllm_config(on):
                graph_towers(made[kind][1], on)
        return made[kind]

    return pair


def replays(model):
    return encoder_of(model).stats.replays.total()


def encoder_of(model):
    (encoder,) = vg.encoders(model).values()
    return encoder


@pytest.mark.parametrize("kind", KINDS)
def test_towers_answer_as_without_the_library(pairs, kind):
    plain, graphed = pairs(kind)
    encoder = encoder_of(graphed)
    before = encoder.stats.calls, replays(graphed)
    for grid in (*GRIDS, *reversed(GRIDS)):
        rows = rows_of(plain, grid)
        assert (
            distance(graphed.visual(rows, list(map(list, grid))), plain.visual(rows, list(map(list, grid)))) < TOLERANCE
        )
    assert encoder.stats.calls == before[0] + 10
    assert replays(graphed) >= before[1] + 12
    assert not encoder.stats.eager


@pytest.mark.parametrize("kind", KINDS)
def test_items_beyond_all_budgets_run_the_tower_eager(pairs, kind):
    plain, graphed = pairs(kind)
    grid, before = [(1, 4, 4), (1, 20, 20)], replays(graphed)
    rows = rows_of(plain, grid)
    assert distance(graphed.visual(rows, grid), plain.visual(rows, grid)) < TOLERANCE
    assert replays(graphed) == before + 1
    assert encoder_of(graphed).stats.eager == {"larger than every budget": 1}
    encoder_of(graphed).stats.eager.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_towers_in_float16_are_no_farther_from_float32_than_those_of_vllm(folders, pairs, kind):
    plain, _ = pairs(kind)
    theirs = load(engine_config(folders[kind], dtype="float16"))
    ours = graphed_in(engine_config(folders[kind], TAPE, dtype="float16"))
    errors = [0.0, 0.0]
    for grid in GRIDS[:4]:
        rows = rows_of(plain, grid)
        exact = plain.visual(rows, grid)
        for index, one in enumerate((theirs, ours)):
            errors[index] += distance(one.visual(rows, grid), exact)
    assert replays(ours) >= 4
    assert errors[1] < 1.1 * errors[0]


def test_a_tower_that_looks_at_its_values_is_left_to_vllm(folders):
    config = engine_config(folders["qwen3_vl"], TAPE)
    model, plain = load(config), load(engine_config(folders["qwen3_vl"]))
    norm = model.visual.blocks[1].norm1

    def looks(x):
        return type(norm).forward(norm, x.clamp(-1e9, 1e9) if x.abs().max().item() > 1e9 else x)

    norm.forward = looks
    with messages() as found, set_current_vllm_config(config):
        graphed = graph_towers(model, config)
    assert not graphed
    assert len(found) == 1
    assert graphed.report().startswith("visual: eager, ")
    assert found[0].startswith("varlen_graphs leaves visual eager: ")
    assert "x.abs().max().item()" in found[0]
    rows = rows_of(model, GRIDS[0])
    assert distance(model.visual(rows, GRIDS[0]), plain.visual(rows, GRIDS[0])) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_images_and_videos_are_embedded_as_without_the_library(pairs, kind):
    plain, graphed = pairs(kind)
    before = replays(graphed)
    for grid in ([(1, 4, 6), (1, 8, 4)], [(2, 8, 4), (1, 6, 6)]):
        for name, rows in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            call = {rows: rows_of(plain, grid), f"{name}_grid_thw": torch.tensor(grid)}
            want, got = plain.embed_multimodal(**call), graphed.embed_multimodal(**call)
            assert len(want) == len(got) == 2
            assert max(map(distance, got, want)) < TOLERANCE
    assert replays(graphed) == before + 4


@pytest.mark.parametrize("kind", KINDS)
def test_the_data_parallel_path_reaches_the_graphs(pairs, kind):
    plain, graphed = pairs(kind)
    grid = [[1, 4, 6], [2, 8, 4], [1, 2, 2]]
    rows, before = rows_of(plain, grid), replays(graphed)
    want, got = (
        run_dp_sharded_mrope_vision_model(model.visual, rows, grid, rope_type="rope_3d") for model in (plain, graphed)
    )
    assert max(map(distance, got, want)) < TOLERANCE
    assert replays(graphed) == before + 1


@pytest.mark.parametrize("kind", KINDS)
def test_towers_of_the_transformers_backend_are_graphed(folders, kind):
    on = engine_config(folders[kind], TAPE, model_impl="transformers")
    plain, graphed = load(engine_config(folders[kind], model_impl="transformers")), load(on)
    with set_current_vllm_config(on):
        graph_towers(graphed, on)
    for grid in ([(1, 4, 6), (1, 8, 4)], [(1, 10, 12), (1, 4, 4)], [(1, 2, 2)]):
        patches = torch.tensor([t * h * w // 4 for t, h, w in grid])
        call = {
            "pixel_values": rows_of(plain, grid),
            "image_grid_thw": torch.tensor(grid),
            "num_image_patches": patches,
        }
        assert max(map(distance, graphed.embed_multimodal(**call), plain.embed_multimodal(**call))) < TOLERANCE
    assert replays(graphed) == 3
    assert not encoder_of(graphed).stats.eager


def test_towers_stay_on_each_gpu_or_are_refused(folders, tmp_path):
    """Two processes over gloo."""
    models = {"MODEL": str(folders["qwen3_vl"]), "GATED": str(folders["glm4v"])}
    results = run_group("tests.engines.vllm_data_parallel", 2, tmp_path, **models)
    assert all(results), "\n".join(path.read_text()[-3000:] for path in sorted(tmp_path.glob("*.log")))
    assert max(one["error"] for one in results) < TOLERANCE
    assert sorted(one["replays"] for one in results) == [2, 3]
    assert all(one["refused"] for one in results)
    assert all(one["graphed in the Transformers backend"] == [True, False] for one in results)


def worker_of(folder, switch, **model):
    """Start a worker as an executor of vLLM's does, up to its profiling run."""
    worker = "tests.engines.vllm_worker.Worker"
    config = engine_config(folder, switch, runner="pooling", enforce_eager=True, worker=worker, **model)
    wrapper = WorkerWrapperBase()
    wrapper.init_worker([{"vllm_config": config, "local_rank": 0, "rank": 0, "distributed_init_method": "env://"}])
    wrapper.init_device()
    with set_current_vllm_config(config):
        wrapper.load_model()
        assert not vg.encoders(wrapper.worker.model_runner.get_model())
        wrapper.determine_available_memory()
    return wrapper.worker.model_runner.get_model()


def test_the_profiling_run_captures_all_graphs_and_no_call_another(folders):
    model = worker_of(folders["qwen3_vl"], TAPE)
    encoder = encoder_of(model)
    assert "MMEncoderAttention" not in op_registry_oot  # which is of the process
    assert len(encoder.executor.store) == len(BUDGETS)
    held = encoder.bytes()
    for grid in GRIDS:
        model.visual(rows_of(model, grid), grid)
    assert replays(model) >= len(GRIDS)
    assert len(encoder.executor.store) == len(BUDGETS)
    assert encoder.bytes() == held


def test_the_log_of_the_start_has_one_line_for_each_tower(folders):
    with messages() as found:
        worker_of(folders["qwen3_vl"], TAPE)
    (only,) = found
    assert re.fullmatch(
        r"varlen_graphs runs visual of Qwen3VLForEmbedding as 3 CUDA graphs of 64 to 256 rows, made in "
        r"\d+\.\d s, which hold \d+ MiB",
        only,
    )


def test_graphs_that_are_missing_are_named(folders):
    """One budget takes more memory than the limit allows, or all of them do."""
    with messages() as found:
        worker_of(folders["qwen3_vl"], TAPE | {"memory": "3MiB"})
    made, missing = found
    assert made.startswith("varlen_graphs runs visual of Qwen3VLForEmbedding as 2 CUDA graphs ")
    assert re.match(r"varlen_graphs uses no graph of \d+ rows for visual: with it graphs hold more than", missing)
    with messages() as found:
        worker_of(folders["qwen3_vl"], TAPE | {"memory": 1000})
    (only,) = found
    assert only.startswith("varlen_graphs has no graphs for visual of Qwen3VLForEmbedding: with it graphs hold more")


@pytest.mark.parametrize("kind", KINDS)
def test_special_layers_are_called(folders, kind):
    """As quantised ones: here a method of its own, for one layer of the attention and one of the MLP."""
    config = engine_config(folders[kind], TAPE)
    models = [load(engine_config(folders[kind])), load(config)]
    for model in models:
        block = model.visual.blocks[1]
        for layer in (block.attn.proj, block.mlp.linear_fc1 if kind == "qwen3_vl" else block.mlp.gate_up_proj):
            layer.quant_method = Doubling()
    with messages() as found, set_current_vllm_config(config):
        graph_towers(models[1], config)
    plain, graphed = models
    assert found[0].startswith("varlen_graphs calls 2 linear layers of visual, such as blocks.1.attn.proj, instead of")
    rows, grid = rows_of(plain, GRIDS[0]), [*map(list, GRIDS[0])]
    for _ in range(2):
        assert distance(graphed.visual(rows, grid), plain.visual(rows, grid)) < TOLERANCE
    assert replays(graphed) == 2


@pytest.mark.parametrize("kind", [*KINDS, "transformers"])
def test_the_engine_may_change_its_configuration_which_layers_hold(folders, kind):
    if kind == "transformers":
        config = engine_config(folders["qwen3_vl"], TAPE, model_impl="transformers")
    else:
        config = engine_config(folders[kind], TAPE)
    model = graphed_in(config)
    rows, grid = rows_of(model, GRIDS[0]), GRIDS[0]
    encoder = encoder_of(model)

    def call():
        if kind != "transformers":
            return model.visual(rows, grid)
        return encoder(rows, torch.tensor(grid)).pooler_output

    expected, captured = call(), len(encoder.executor.store)
    config.cache_config.num_gpu_blocks = 28_615
    config.compilation_config.static_forward_context["more"] = nn.Linear(8, 8)
    assert config.observability_config.show_hidden_metrics is False  # a property that is cached
    encoder.check()
    assert torch.equal(call(), expected)
    assert captured == len(encoder.executor.store) == len(BUDGETS)  # released graphs come back one by one


class Doubling(UnquantizedLinearMethod):
    """A method whose product is not the plain one."""

    def apply(self, layer, x, bias=None):
        return super().apply(layer, 2 * x, bias)


def test_placeholders_of_packages_that_are_absent_are_not_touched(folders, monkeypatch):
    absent = PlaceholderModule("a_package_that_is_absent")
    for name in ("vllm.model_executor.models.qwen3_vl", "vllm.model_executor.layers.linear"):
        monkeypatch.setattr(sys.modules[name], "absent", absent, raising=False)
        monkeypatch.setattr(sys.modules[name], "part_of_it", absent.placeholder_attr("part"), raising=False)
    with pytest.raises(ModuleNotFoundError):
        _ = absent.anything
    graphed = graphed_in(engine_config(folders["qwen3_vl"], TAPE))
    graphed.visual(rows_of(graphed, GRIDS[0]), GRIDS[0])
    assert replays(graphed) == 1


def test_the_profiling_run_captures_for_the_arguments_of_its_calls(tmp_path):
    """The Transformers backend asks towers without a recipe for hidden states."""
    model = worker_of(write_llava(tmp_path), {"backend": "tape"}, model_impl="transformers")
    encoder = encoder_of(model)
    held = len(encoder.executor.store)
    assert held == len(encoder.budgets)
    for images in (1, 3, 20):
        pixels, patches = torch.randn(images, 3, 32, 32), torch.tensor([16] * images)
        assert len(model.embed_multimodal(pixel_values=pixels, num_image_patches=patches)) == images
    assert replays(model) >= 3
    assert not encoder.stats.eager
    assert len(encoder.executor.store) == held


def test_memory_that_is_short_in_a_capture_ends_no_engine(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(assemble.CaptureCheck, "__call__", fail)
    with messages() as found:
        model = worker_of(write_llava(tmp_path), {"backend": "tape"}, model_impl="transformers")
    assert not vg.encoders(model) or not replays(model)
    assert any("no room" in message for message in found), found
    patches = torch.tensor([16])
    assert len(model.embed_multimodal(pixel_values=torch.randn(1, 3, 32, 32), num_image_patches=patches)) == 1


@pytest.mark.filterwarnings("ignore:a call of Qwen3_VisionTransformer")
def test_calls_that_graphs_refuse_run_the_tower_eager(folders):
    """As with an image whose pixels are floating: vLLM's processor rescales none, and its tower takes both."""
    config = engine_config(folders["qwen3_vl"], TAPE)
    plain, graphed = load(engine_config(folders["qwen3_vl"])), graphed_in(config)
    grid = GRIDS[0]
    rows = rows_of(plain, grid)
    assert distance(graphed.visual(rows.float(), grid), plain.visual(rows.float(), grid)) < TOLERANCE
    assert replays(graphed) == 0
    assert encoder_of(graphed).stats.eager.total() == 1


def test_weights_that_are_replaced_are_captured_again(folders):
    config = engine_config(folders["qwen3_vl"], TAPE)
    graphed, grid = graphed_in(config), GRIDS[0]
    rows = rows_of(graphed, grid)
    before = graphed.visual(rows, grid).clone()
    layer = graphed.visual.blocks[0].mlp.linear_fc2
    layer.weight = torch.nn.Parameter(layer.weight * 2, requires_grad=False)
    after = graphed.visual(rows, grid)
    assert distance(after, before) > TOLERANCE
    assert distance(after, type(graphed.visual).forward(graphed.visual, rows, grid)) < TOLERANCE


def test_engines_that_promise_bits_are_left_alone(folders, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with messages() as found:
        assert read_settings(engine_config(folders["qwen3_vl"], TAPE)) is None
    assert any("VLLM_BATCH_INVARIANT=1 asks for the same bits" in message for message in found)


def test_an_engine_without_the_switch_is_unchanged(folders):
    model = worker_of(folders["qwen3_vl"], None)
    assert not vg.encoders(model)
    assert "MMEncoderAttention" not in op_registry_oot
    assert type(model.visual.blocks[0].attn.attn) is MMEncoderAttention
    assert read_settings(engine_config(folders["qwen3_vl"], False)) is None


@contextmanager
def messages():
    """Collect what is logged for the users of vLLM."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("vllm.varlen_graphs")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)  # vLLM's default, where tests ask for less
    try:
        yield found
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def test_a_model_without_a_tower_says_that_nothing_is_graphed(folders):
    with messages() as found:
        assert not graph_towers(torch.nn.Linear(2, 2), engine_config(folders["qwen3_vl"], TAPE))
        assert not graph_towers(torch.nn.Linear(2, 2), engine_config(folders["qwen3_vl"]))  # switched off
    (only,) = found
    assert only.startswith("varlen_graphs is switched on, but Linear has no tower that it graphs: expected one of")


@pytest.mark.parametrize("name", ["cudagraph_mm_encoder", "compile_mm_encoder"])
def test_encoders_that_vllm_graphs_or_compiles_are_left_to_it(folders, name):
    config = engine_config(folders["qwen3_vl"], TAPE, engine={"compilation_config": CompilationConfig(**{name: True})})
    with messages() as found:
        assert read_settings(config) is None
    assert f"whose {name} is on" in found[0]
    assert "expected it off" in found[0]


def graphed_in(config):
    model = load(config)
    with set_current_vllm_config(config):
        graph_towers(model, config)
    return model


def test_pruned_videos_and_adapters_of_the_tower_run_eager(folders):
    lora = LoRAConfig(max_lora_rank=8, max_loras=1, enable_tower_connector_lora=True)
    for config, reason in (
        (engine_config(folders["qwen3_vl"], TAPE, video_pruning_rate=0.5), "vLLM prunes video tokens by their content"),
        (
            engine_config(folders["qwen3_vl"], TAPE, engine={"lora_config": lora}),
            "vLLM applies LoRA adapters to the tower",
        ),
    ):
        model = graphed_in(config)
        plain, encoder = load(engine_config(folders["qwen3_vl"])), encoder_of(model)
        rows = rows_of(model, GRIDS[0])
        assert distance(model.visual(rows, GRIDS[0]), plain.visual(rows, GRIDS[0])) < TOLERANCE
        assert encoder.stats.eager == {reason: 1}
        assert not len(encoder.executor.store)


def test_attention_that_graphs_cannot_hold_leaves_the_tower_to_vllm(folders):
    config = engine_config(folders["qwen3_vl"], TAPE)
    model = load(config)
    model.visual.blocks[1].attn.attn.fp8_enabled = True
    with messages() as found, set_current_vllm_config(config):
        assert not graph_towers(model, config)
    assert found[0].startswith("varlen_graphs leaves visual eager: the attention of blocks.1.attn.attn is in FP8")


def test_attention_of_another_plugin_leaves_the_tower_to_vllm(folders, monkeypatch):
    class Other(MMEncoderAttention):
        pass

    monkeypatch.setitem(op_registry_oot, "MMEncoderAttention", Other)
    config = engine_config(folders["qwen3_vl"], TAPE)
    with messages() as found:
        assert not vg.encoders(graphed_in(config))
    assert "is another plugin's attention, " in found[0]


def test_the_switch_is_a_flag_of_the_command_line():
    flag = ["--additional-config", '{"varlen_graphs": {"budgets": [256, 512], "memory": "2GiB"}}']
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    assert parser.parse_args(flag).additional_config["varlen_graphs"] == {"budgets": [256, 512], "memory": "2GiB"}


def test_graphing_twice_changes_nothing(pairs, folders):
    _, graphed = pairs("glm4v")
    encoder = encoder_of(graphed)
    config = engine_config(folders["glm4v"], TAPE)
    with set_current_vllm_config(config):
        assert list(graph_towers(graphed, config).values()) == [encoder]


@pytest.mark.parametrize("switch", ["yes", {"budget": [64]}, {"budgets": {"mins": 3}}, {"attention": True}])
def test_settings_that_mean_nothing_are_refused(folders, switch):
    with pytest.raises(SpecError, match="expected"):
        read_settings(engine_config(folders["qwen3_vl"], switch))


def test_budgets_may_be_a_ladder(folders):
    settings = read_settings(engine_config(folders["qwen3_vl"], {"budgets": {"min": 64, "max": 256}}))
    assert settings.budgets == vg.Ladder(64, 256)
    assert read_settings(engine_config(folders["qwen3_vl"], True)).budgets is None


def test_vllm_finds_the_plugin():
    assert load_plugins_by_group("vllm.general_plugins")["varlen_graphs"] is register


def test_registering_again_changes_nothing():
    init_device = WorkerWrapperBase.init_device
    register()
    assert WorkerWrapperBase.init_device is init_device


def test_another_version_of_vllm_is_left_alone(monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.34.0")
    with messages() as found:
        register()
    assert found == ["varlen_graphs does nothing: vLLM is 0.34.0, expected 0.33.x; try pip install vllm==0.33.0"]


def test_imports_load_no_part_of_vllm_and_initialise_no_cuda():
    code = """
import sys, torch, varlen_graphs
assert not [name for name in sys.modules if name.startswith(("vllm", "varlen_graphs.engines"))]
from varlen_graphs.engines.vllm import register
assert "vllm" not in sys.modules
import tests.engines.vllm_setup
register()
assert "vllm" in sys.modules and "vllm.v1.worker.gpu_model_runner" not in sys.modules
assert not torch.cuda.is_initialized()
from vllm.model_executor.custom_op import op_registry_oot
assert "MMEncoderAttention" not in op_registry_oot
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=ROOT)
