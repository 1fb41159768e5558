"""Where rows, items and outputs go, on real CUDA graphs."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import varlen_graphs as vg
from tests.support.contract import UNCOMMON, check_outputs_of_all_kinds, check_uncommon_dtypes
from tests.support.gpu import on_gpus, pixels_on_gpu, tower_on_gpu
from tests.support.towers import distance, equal_bits

pytestmark = on_gpus()

BUDGETS = [vg.budgets.Budget(512, items=8, segments=128), vg.budgets.Budget(1024, items=8, segments=256)]
LAYOUTS = [[(1, 14, 14), (1, 8, 20)], [(4, 10, 10), (1, 14, 14), (2, 2, 2)], [(1, 2, 2)], [(40, 2, 2)], [(1, 32, 32)]]
LONG = 2_000_000_000
"""Clock cycles, about a second."""


@pytest.fixture(scope="module")
def tower():
    return tower_on_gpu()


@pytest.fixture(scope="module")
def encoder(tower):
    return vg.recipes.qwen3_vl(tower, BUDGETS)


def on_gpu(grid):
    return torch.tensor(grid, device="cuda")


def hundred_calls():
    grids = [[(1, 2 + 2 * (i % 7), 2 + 2 * (i % 5)), (1 + i % 3, 4, 6)] for i in range(100)]
    return grids, [pixels_on_gpu(grid, seed) for seed, grid in enumerate(grids)]


@pytest.mark.parametrize("where", [lambda grid: grid, on_gpu], ids=["host", "gpu"])
def test_calls_queued_behind_a_long_kernel_keep_their_own_layouts(encoder, where):
    grids, rows = hundred_calls()
    layouts = [where(grid) for grid in grids]
    expected = [encoder(r, grid_thw=g) for r, g in zip(rows, layouts, strict=True)]
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    got = [encoder(r, grid_thw=g) for r, g in zip(rows, layouts, strict=True)]
    queued = not torch.cuda.current_stream().query()
    assert all(equal_bits(a, b) for a, b in zip(got, expected, strict=True))
    assert queued
    encoder.check()


def test_uploads_in_flight_have_blocks_of_their_own(encoder):
    grids, rows = hundred_calls()
    ring = encoder.capture().executor.store.arena.ring
    for r, g in zip(rows, grids, strict=True):
        encoder(r, grid_thw=g)  # the first call of each graph is compared with the module
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    for r, g in zip(rows, grids, strict=True):
        encoder(r, grid_thw=g)
    assert len(ring) >= 100
    torch.cuda.synchronize()
    before = len(ring)
    for r, g in zip(rows, grids, strict=True):
        encoder(r, grid_thw=g)
        torch.cuda.synchronize()
    assert len(ring) == before


def test_stages_queued_behind_a_long_kernel_keep_their_own_rows(encoder):
    grids, rows = hundred_calls()
    expected = [encoder(r, grid_thw=g) for r, g in zip(rows, grids, strict=True)]
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    got = []
    for r, g in zip(rows, grids, strict=True):
        with encoder.stage(g) as stage:
            stage.rows.copy_(r)
        got.append(stage.output)
    assert all(equal_bits(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("backend", ["cuda", "eager"])
def test_a_stage_may_be_read_on_another_stream_than_it_was_written_on(tower, encoder, backend):
    grids, rows = hundred_calls()
    expected = [encoder(r, grid_thw=g) for r, g in zip(rows, grids, strict=True)]
    staging = encoder if backend == "cuda" else vg.recipes.qwen3_vl(tower, BUDGETS, backend="eager")
    staging(rows[0], grid_thw=grids[0])
    torch.cuda.synchronize()
    writing, reading, got = torch.cuda.Stream(), torch.cuda.Stream(), []
    for at, (r, g) in enumerate(zip(rows, grids, strict=True)):
        with torch.cuda.stream(writing), staging.stage(g) as stage:
            if at % 2:
                torch.cuda._sleep(2_000_000)
            stage.rows.copy_(r)
            with torch.cuda.stream(reading):
                if at % 3:
                    torch.cuda._sleep(2_000_000)  # the next rows are written meanwhile, unless they wait
                got.append(stage.output)
    torch.cuda.synchronize()
    assert all(distance(a, b) <= 3e-2 for a, b in zip(got, expected, strict=True))


def without_sync(function):
    torch.cuda.set_sync_debug_mode("error")
    try:
        return function()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_call_syncs(encoder, layout):
    rows, grid = pixels_on_gpu(layout), on_gpu(layout)
    expected = encoder(rows, grid_thw=layout)
    assert equal_bits(encoder(rows, grid_thw=grid), expected)  # the first such call compiles the check
    assert equal_bits(without_sync(lambda: encoder(rows, grid_thw=layout)), expected)
    assert equal_bits(without_sync(lambda: encoder(rows, grid_thw=grid)), expected)
    assert equal_bits(without_sync(lambda: encoder(rows, grid_thw=grid.int())), expected)

    def staged():
        with encoder.stage(layout) as stage:
            stage.rows.copy_(rows)
        return stage.output

    assert equal_bits(without_sync(staged), expected)
    encoder.check()


@pytest.mark.parametrize(
    ("grid", "rows", "message"),
    [
        ([(1, 4, 4), (1, 2, 4)], 20, "describes more rows in all, but 20 came"),
        ([(1, 2, 4)], 20, "describes 8 rows in all, but 20 came"),
        ([(1, 4, 4), (1, -2, 2)], 16, r"grid_thw\[1\] has a size of -2"),
        ([(1, 4, 5)], 20, r"grid_thw\[0\] has a side of 5"),
        ([(2**62, 4, 4)], 16, "describes more rows in all"),
        ([(2**31, 2**31, 2**31)], 16, "describes more rows in all"),
    ],
)
def test_wrong_layouts_give_nan_and_harm_no_other_call(encoder, grid, rows, message):
    right = pixels_on_gpu(LAYOUTS[0])
    expected = encoder(right, grid_thw=LAYOUTS[0])
    out = encoder(pixels_on_gpu([(1, 1, rows)]), grid_thw=on_gpu(grid))
    assert all(t.isnan().all() for t in (out.last_hidden_state, out.pooler_output, *out.deepstack_features))
    torch.cuda.synchronize()
    before = encoder.stats.wrong_layouts
    assert equal_bits(encoder(right, grid_thw=LAYOUTS[0]), expected)
    assert encoder.stats.wrong_layouts == before + 1
    with pytest.raises(vg.errors.LayoutError, match=message):
        encoder.check()
    encoder.check()
    assert equal_bits(encoder(right, grid_thw=on_gpu(LAYOUTS[0])), expected)
    encoder.check()


def test_calls_that_wait_for_their_check_raise_themselves(tower):
    encoder = vg.recipes.qwen3_vl(tower, BUDGETS, layouts="checked")
    right = pixels_on_gpu(LAYOUTS[0])
    expected = encoder(right, grid_thw=LAYOUTS[0])
    for _ in range(3):
        torch.cuda._sleep(LONG // 10)
        with pytest.raises(vg.errors.LayoutError, match="describes 8 rows in all, but 16 came"):
            encoder(pixels_on_gpu([(1, 4, 4)]), grid_thw=on_gpu([(1, 4, 2)]))
        assert equal_bits(encoder(right, grid_thw=on_gpu(LAYOUTS[0])), expected)
    encoder.check()
    assert encoder.stats.wrong_layouts == 3


def test_the_check_waits_for_what_is_queued(encoder):
    torch.cuda._sleep(LONG)
    encoder(pixels_on_gpu([(1, 4, 4)]), grid_thw=on_gpu([(1, 4, 2)]))
    with pytest.raises(vg.errors.LayoutError, match="describes 8 rows in all, but 16 came"):
        encoder.check()


def test_legal_videos_are_right_where_segments_might_not_suffice(tower):
    encoder = vg.recipes.qwen3_vl(
        tower, [vg.budgets.Budget(512, items=8, segments=8), vg.budgets.Budget(1024, items=8, segments=64)]
    )
    for layout in LAYOUTS[1:4]:
        rows = pixels_on_gpu(layout)
        assert equal_bits(encoder(rows, grid_thw=on_gpu(layout)), encoder(rows, grid_thw=layout))
    encoder.check()


def test_all_outputs_are_copied_by_one_launch(encoder):
    rows, grid = pixels_on_gpu(LAYOUTS[0]), LAYOUTS[0]
    encoder(rows, grid_thw=grid)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        encoder(rows, grid_thw=grid)
        torch.cuda.synchronize()
    names = [event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert sum("multi_tensor" in name for name in names) == 1, names


def test_outputs_that_are_inputs_weights_or_views_are_right():
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            y = self.linear(x)
            wide = torch.cat([y, y], 1)
            weight = self.linear.weight[:1].expand(len(x), 8)
            return {"in": x, "y": y, "view": wide[:, 3:11], "weight": weight, "kinds": x[:, 0].long(), "flat": y.mT.mT}

    outputs = vg.outputs.Fields(**dict.fromkeys(["in", "y", "view", "weight", "kinds", "flat"], vg.outputs.Rows()))
    module = Several().to("cuda")
    encoder = vg.GraphedEncoder(module, [128, 256, 512], vg.BufferSpec("x", vg.Lengths(), outputs=outputs))
    for count in (500, 3, 200, 128):
        rows = torch.randn(count, 8, device="cuda")
        encoder.poison()
        got, expected = encoder(rows, lengths=[count]), encoder.eager(rows, lengths=[count])
        for name in got:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-5)
        for tensor in got.values():
            tensor.zero_()
    assert module.linear.weight.abs().max() > 0


def test_outputs_of_all_kinds_are_the_same_wherever_the_layout_comes_from():
    check_outputs_of_all_kinds("cuda", "cuda")


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", UNCOMMON, ids=str)
def test_rows_and_outputs_of_uncommon_dtypes_are_copied_bit_for_bit(dtype):
    check_uncommon_dtypes("cuda", "cuda", dtype)


def test_the_default_device_for_new_tensors_changes_nothing(tower, encoder):
    rows, grid = pixels_on_gpu(LAYOUTS[0]), LAYOUTS[0]
    expected = encoder(rows, grid_thw=grid)
    with torch.device("cuda"):
        other = vg.recipes.qwen3_vl(tower, BUDGETS)
        outputs = [other(rows, grid_thw=grid), other(rows, grid_thw=on_gpu(grid)), other.eager(rows, grid_thw=grid)]
        other.check()
    assert all(distance(output, expected) <= 3e-2 for output in outputs)


def test_budgets_share_the_memory_of_their_outputs():
    class Big(nn.Module):
        def forward(self, x):
            return x.repeat(1, 4096)

    def graph_memory(budgets):
        encoder = vg.GraphedEncoder(Big(), budgets, vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths()))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        encoder(torch.ones(5, 8, device="cuda"), lengths=[5])
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        used = torch.cuda.memory_reserved() - before
        encoder.release()
        return used

    assert graph_memory([1024 - 128 * i for i in range(4)]) < 1.5 * graph_memory([1024])
