"""`CompiledForward`: a forward under torch's compiler: one compilation for all budgets, and an error where it would take more."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import varlen_graphs as vg
from tests.support import minicpm, towers
from tests.support.encoders import UNVERIFIED
from varlen_graphs.attention import tile_schedule
from varlen_graphs.capture.compiled import CompiledForward
from varlen_graphs.graphs.arena import Arena


def test_one_compilation_serves_every_number_of_rows():
    weight = torch.randn(8, 8)

    def forward(x, cu_seqlens, max_seqlen):
        q = (x @ weight).unflatten(-1, (2, 4))
        return vg.varlen_attention(q, q, q, cu_seqlens, max_seqlen).flatten(1) * 0.5 + x

    compiled = CompiledForward(forward, backend="aot_eager")
    assert compiled.seconds is None
    for rows in (8, 64, 24, 16, 128):  # the first has as many rows as channels
        x, cu_seqlens = torch.randn(rows, 8), torch.tensor([0, rows // 2, rows], dtype=torch.int32)
        got = compiled(vg.budgets.Budget(rows), x=x, cu_seqlens=cu_seqlens, max_seqlen=rows)
        torch.testing.assert_close(got, forward(x, cu_seqlens, rows))
    assert compiled.seconds > 0


def test_tile_schedules_with_and_without_long_tiles_need_one_compilation():
    def forward(x, cu_seqlens, max_seqlen, schedule):
        return vg.varlen_attention(x, x, x, cu_seqlens, max_seqlen, schedule=schedule)

    compiled = CompiledForward(forward, backend="aot_eager")
    for rows in (2048, 512, 1024, 2000):
        x, cu_seqlens = torch.randn(rows, 2, 8), torch.tensor([0, 7, rows], dtype=torch.int32)
        schedule = tile_schedule(cu_seqlens, rows, rows=rows, heads=2, head_dim=8)
        if rows > 1000:  # as on a GPU with a kernel for long segments
            schedule = replace(schedule, long_tiles=schedule.tiles.clone(), long_block=128)
        got = compiled(vg.budgets.Budget(rows), x=x, cu_seqlens=cu_seqlens, max_seqlen=rows, schedule=schedule)
        torch.testing.assert_close(got, forward(x, cu_seqlens, rows, schedule))


def test_what_depends_on_the_budget_is_not_compiled_again():
    compiled = CompiledForward(lambda x, rows: x * 2 if rows > 100 else x, backend="eager")
    compiled(vg.budgets.Budget(10), x=torch.ones(4), rows=10)
    with pytest.raises(
        vg.errors.CaptureError, match=r"(?s)compile=True would recompile for each budget, because of .*rows"
    ):
        compiled(vg.budgets.Budget(200), x=torch.ones(4), rows=200)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"scale": 1.0}, {"scale": 2.0}),
        ({"scale": 1.0}, {"mode": "half"}),
        ({"scale": 1.0}, {"budget": "an argument of this name"}),
        ({"dtype": torch.float32}, {"dtype": torch.float64}),  # released, cast and captured anew
    ],
)
def test_what_another_capture_differs_in_is_compiled_at_its_first_budget(before, after):
    def forward(x, scale=1.0, mode="whole", budget=None):
        return x * (scale if mode == "whole" else scale / 2)

    compiled = CompiledForward(forward, backend="eager")
    for static_args in (before, after):
        dtype = static_args.pop("dtype", torch.float32)
        for rows in (64, 32, 16):
            x = torch.randn(rows, dtype=dtype)
            got = compiled(vg.budgets.Budget(rows), x=x, **static_args)
            torch.testing.assert_close(got, forward(x, **static_args))


def test_budgets_of_one_item_are_compiled_apart():
    compiled = CompiledForward(lambda x: x * 2, backend="eager")
    for items in (8, 4, 1, 2, 1):  # the compiler takes a size of 1 for a constant
        x = torch.randn(items, 16)
        torch.testing.assert_close(compiled(vg.budgets.Budget(16 * items, items=items), x=x), x * 2)


def test_any_number_of_encoders_is_compiled():
    class Scale:
        def __init__(self, factor):
            self.factor = factor

        def run(self, x):
            return x * self.factor

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    for number in range(20):
        compiled = CompiledForward(Scale(float(number)).run, backend=backend)
        for rows in (64, 32):
            assert compiled(vg.budgets.Budget(rows), x=torch.ones(rows))[0] == number
    assert len(graphs) == 20


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(8, width), torch.nn.Linear(width, 8)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(x)))


class Tower(torch.nn.Module):
    """Layers, of which the last has another size."""

    def __init__(self, kind):
        super().__init__()
        self.layers = kind(*map(Layer, [16] * 5 + [24])) if kind is torch.nn.Sequential else kind(map(Layer, [16] * 6))
        self.skips = False

    def forward(self, x):
        for layer in self.layers[self.skips :]:
            x = layer(x)
        return x


@pytest.mark.parametrize(("kind", "graphs"), [(torch.nn.ModuleList, 1), (torch.nn.Sequential, 2)])
def test_of_repeated_blocks_those_that_differ_are_compiled_and_no_more(kind, graphs):
    tower, counter = Tower(kind), CompileCounter()
    compiled = CompiledForward(tower, tower, backend=counter)
    with torch.no_grad():
        for rows in (64, 32, 8, 16):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(compiled(vg.budgets.Budget(rows), x=x), tower(x))
    assert counter.frame_count == graphs
    assert not any("forward" in vars(layer) for layer in tower.layers)


def test_a_forward_that_does_not_run_all_blocks_is_compiled_as_a_whole():
    tower, counter = Tower(torch.nn.ModuleList), CompileCounter()
    tower.skips = True
    compiled = CompiledForward(tower, tower, backend=counter)
    with torch.no_grad():
        x = torch.randn(64, 8)
        torch.testing.assert_close(compiled(vg.budgets.Budget(64), x=x), tower(x))
        blocks = counter.op_count
        torch.testing.assert_close(compiled(vg.budgets.Budget(32), x=x[:32]), tower(x[:32]))
    assert counter.op_count == blocks
    assert counter.frame_count == 2  # a block, before it is known, and all that run


def test_a_block_keeps_a_forward_of_its_own():
    tower = Tower(torch.nn.ModuleList)
    tower.layers[0].forward = own = lambda x: -x
    compiled = CompiledForward(tower, tower, backend="eager")
    x = torch.randn(64, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(vg.budgets.Budget(64), x=x), tower(x))
    assert tower.layers[0].forward is own


def recipe(name, **options):
    """Return the encoder of a tower with one layer of each kind."""
    if name == "minicpmv":
        return vg.recipes.minicpmv(*minicpm.models("2.6"), [256, 512, 1024], **options)
    if name == "resampler":
        return vg.recipes.resampler(minicpm.models("2.6")[1], [256, 512, 1024], **options)
    tower = {
        "qwen2_vl": lambda: towers.qwen2_tower(family="qwen2_vl", depth=1),
        "qwen2_5_vl": lambda: towers.qwen2_tower(depth=2, fullatt_block_indexes=[1]),
        "qwen3_vl": lambda: towers.qwen3_vl_tower(depth=1, deepstack_visual_indexes=[0]),
        "qwen3_omni_audio": lambda: towers.qwen3_omni_audio_tower(
            encoder_layers=1,
            conv_chunksize=500,  # one piece, as in real budgets
        ),
        "glm4v": lambda: towers.glm4v_tower(depth=1),
        "siglip2": lambda: towers.siglip2_tower(num_hidden_layers=1),
    }[name]()
    budgets = [vg.budgets.Budget(rows, segments=rows // 4) for rows in (256, 512, 1024)]
    return getattr(vg.recipes, name)(tower, budgets, **options)


NAMES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_omni_audio", "glm4v", "siglip2", "minicpmv", "resampler"]


@pytest.mark.parametrize("name", NAMES)
def test_the_forward_of_a_recipe_is_one_graph_for_all_budgets(name):
    """Where the compiler cannot follow, it would compile what comes before and after for itself."""
    encoder, graphs = recipe(name, backend="tape", verify=UNVERIFIED), CompileCounter()
    forward, spec = encoder.executor.forward, encoder.spec
    forward.compiled = CompiledForward(partial(forward.function, forward.module), backend=graphs)
    arena = Arena(spec, encoder.budgets, spec.row_input.shape, torch.float32, torch.device("cpu"))
    for budget in reversed(encoder.budgets):
        arena.load_sample(budget)
        with torch.no_grad():
            forward.run(forward.arguments(*arena.view(budget), {}), budget)
    assert graphs.frame_count == 1
