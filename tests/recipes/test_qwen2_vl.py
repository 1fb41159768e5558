"""Qwen2-VL, Qwen2.5-VL and the vision tower of Qwen2.5-Omni."""

from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings

import varlen_graphs as vg
from tests.support import strategies
from tests.support.contract import check_padding_contract
from tests.support.encoders import UNVERIFIED
from tests.support.recipe_contract import RecipeContract
from tests.support.towers import QWEN2, ROW, distance, original_of, pixels, pooled, qwen2_recipe, qwen2_tower
from varlen_graphs.attention.transformers import use_attention

IMAGES = [(1, 8, 14), (1, 6, 10), (1, 2, 2)]
VIDEO = [(5, 4, 6)]


def qwen2_encoder(tower, budgets=(256,), **options):
    return qwen2_recipe(tower)(tower, budgets, backend="tape", **options)


@pytest.fixture(scope="module", params=QWEN2)
def tower(request):
    return qwen2_tower(family=request.param)


@pytest.fixture(scope="module")
def encoder(tower):
    return qwen2_encoder(
        tower, [vg.budgets.Budget(128, items=6, segments=8), vg.budgets.Budget(256, items=6, segments=20)]
    )


def test_the_padding_contract_holds_for_images_videos_and_both(tower, encoder):
    layouts = [
        [(1, 16, 16)],  # all rows of the largest budget, nine windows
        [(1, 2, 2)],  # the smallest item there is
        IMAGES,
        VIDEO,
        [(1, 6, 42)],  # whole windows, side by side
        [*VIDEO, *IMAGES[1:]],  # both in one call
        [(1, 8, 16)],  # exactly the smaller budget
        [(20, 2, 2)],  # more frames than items, and all segments
        [(5, 8, 6)],  # two windows a frame, one of them flat
        [(1, 2, 2)] * 6,  # no item of padding
    ]
    check_padding_contract(encoder, original_of(tower), pixels, "grid_thw", layouts, 1e-5)


SHARED_TOWER = qwen2_tower(seed=1)
SHARED = qwen2_encoder(SHARED_TOWER, [vg.budgets.Budget(256, items=4, segments=12)])


@settings(max_examples=25)
@given(strategies.grids(merge=2, max_items=8, max_side=18))
def test_any_call_equals_the_original(grid):
    rows = pixels(grid)
    assert distance(SHARED(rows, grid_thw=grid), original_of(SHARED_TOWER)(rows, grid)) < 1e-5


def test_the_call_and_the_output_are_the_towers_own(tower, encoder):
    encoder.stats.eager.clear()
    rows, grid = pixels(IMAGES), torch.tensor(IMAGES)
    expected = original_of(tower)(rows, IMAGES)
    for output in (
        encoder(rows, grid_thw=grid),
        encoder(rows, grid),
        encoder(hidden_states=rows, grid_thw=grid, return_dict=True),
        encoder.eager(rows, grid_thw=grid),
    ):
        assert type(output) is type(expected)
        assert distance(output, expected) < 1e-5
    assert not encoder.stats.eager
    if isinstance(expected, torch.Tensor):
        return  # transformers 4.57 has nothing but tensors
    as_tuple = encoder(rows, grid_thw=grid, return_dict=False)
    assert distance(as_tuple, expected.to_tuple()) < 1e-5
    assert encoder.stats.eager == {"return_dict=False": 1}


def test_items_that_are_split_over_replays_come_in_their_order(tower):
    encoder = qwen2_encoder(tower, [vg.budgets.Budget(128, items=2, segments=8)])
    grid = [(1, 4, 14), (1, 8, 8), (3, 4, 4), (1, 10, 6)]
    rows = pixels(grid)
    assert distance(pooled(encoder(rows, grid_thw=grid)), pooled(original_of(tower)(rows, grid))) < 1e-5
    assert encoder.stats.replays.total() > 1


def test_layers_attend_as_the_tower_says():
    tower = qwen2_tower()
    before = pooled(qwen2_encoder(tower, verify=UNVERIFIED)(pixels(IMAGES), grid_thw=IMAGES))
    tower.fullatt_block_indexes = [0]
    rows = pixels(IMAGES)
    after = qwen2_encoder(tower, verify=UNVERIFIED)(rows, grid_thw=IMAGES)
    assert distance(after, original_of(tower)(rows, IMAGES)) < 1e-5
    assert distance(pooled(after), before) > 1e-3


def test_the_default_budgets_hold_any_images_of_half_a_window_a_side():
    budgets = vg.recipes.qwen2_5_vl(qwen2_tower(patch_size=14, window_size=112), backend="tape").budgets
    assert [budget.rows for budget in budgets] == list(vg.Ladder().row_counts())
    spec = vg.recipes.qwen2_5_vl(qwen2_tower(patch_size=14, window_size=112), backend="tape").spec
    for h in range(4, 64, 2):
        for w in range(4, 64, 2):
            usage = spec.usage.of_items((1, h, w))
            assert usage.segments <= max(8, usage.rows // 16)
    assert all(budget.segments == max(8, budget.rows // 16) for budget in budgets)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_5_omni"])
def test_the_sizes_of_the_real_tower(family):
    """Two of its heads, of 80 channels, windows of 8 x 8 patches, 3420 inner channels."""
    real = {"hidden_size": 160, "intermediate_size": 3420, "num_heads": 2, "patch_size": 14, "out_hidden_size": 512}
    config = real | {"depth": 2, "window_size": 112, "fullatt_block_indexes": [1]}
    tower = qwen2_tower(family=family, **config)
    grid = [(1, 14, 22), (2, 8, 10)]
    rows = pixels(grid, row=3 * 2 * 14 * 14)
    encoder = qwen2_encoder(tower, [vg.budgets.Budget(512, segments=32)], verify=UNVERIFIED)
    assert distance(encoder(rows, grid_thw=grid), original_of(tower)(rows, grid)) < 1e-5
    assert not encoder.stats.eager


def test_the_sizes_of_the_real_qwen2_vl():
    tower = qwen2_tower(family="qwen2_vl", depth=2, embed_dim=160, num_heads=2, patch_size=14, mlp_ratio=4)
    grid = [(1, 14, 22), (2, 8, 10)]
    rows = pixels(grid, row=3 * 2 * 14 * 14)
    encoder = qwen2_encoder(tower, [512], verify=UNVERIFIED)
    assert distance(encoder(rows, grid_thw=grid), original_of(tower)(rows, grid)) < 1e-5


@pytest.mark.skipif(not find_spec("transformers.vision_utils"), reason="towers of transformers 4.57 take no buffers")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_5_omni"])
def test_an_unmodified_tower_is_graphed_from_declared_buffers(family):
    tower = qwen2_tower(family=family)
    windows = vg.layouts.Windows(3)
    spec = vg.BufferSpec(
        rows=vg.inputs.Rows("hidden_states", shape=(ROW,)),
        layout=vg.GridTHW(merge=2),
        buffers=[
            vg.buffers.CuSeqlens(per="frame"),
            vg.buffers.MaxSeqlen(per="frame"),
            vg.buffers.GridPositions("position_ids", order="merge_block"),
            vg.buffers.WindowIndex(windows),
            vg.buffers.CuSeqlens("cu_window_seqlens", per=windows),
            vg.buffers.MaxSeqlen("max_window_seqlen", per=windows),
        ],
        outputs=vg.outputs.Fields(last_hidden_state=vg.outputs.Rows(), pooler_output=vg.outputs.Rows(every=4)),
    )

    def forward(tower, **arguments):
        with use_attention(tower):
            return tower(**arguments)

    encoder = vg.GraphedEncoder(tower, [vg.budgets.Budget(256, segments=24)], spec, forward=forward, backend="tape")
    layouts = [[(1, 16, 16)], [(1, 2, 2)], [*VIDEO, *IMAGES[:1]]]
    check_padding_contract(encoder, original_of(tower), pixels, "grid_thw", layouts, 1e-5)


class TestContract(RecipeContract):
    budgets, argument = [256], "grid_thw"
    families = tuple({"family": family, "seed": seed} for family in QWEN2 for seed in range(2))
    tower, original = staticmethod(qwen2_tower), staticmethod(original_of)
    adapted, hooked = ("patch_embed.proj", "blocks.0.attn.qkv", "blocks.1.mlp.up_proj", "blocks.2.norm1"), "blocks.1"

    def recipe(self, tower, budgets, **options):
        return qwen2_recipe(tower)(tower, budgets, **options)

    def example(self):
        return pixels(IMAGES), IMAGES
