"""`vg.recipes.glm4v`: the vision towers of GLM-4.1V and its successors."""

import pytest
import torch
from hypothesis import given, settings

import varlen_graphs as vg
from tests.support import strategies
from tests.support.contract import check_padding_contract
from tests.support.encoders import UNVERIFIED
from tests.support.recipe_contract import RecipeContract
from tests.support.towers import GLM, distance, frames, glm4v_tower, original_by_frame, pixels, tensors

IMAGES = [(1, 8, 8), (1, 6, 10), (1, 2, 2)]
VIDEO = [(5, 4, 6)]
BUDGETS = [vg.budgets.Budget(128, items=6, segments=8), vg.budgets.Budget(256, items=6, segments=20)]


@pytest.fixture(scope="module", params=GLM)
def tower(request):
    return glm4v_tower(family=request.param)


@pytest.fixture(scope="module")
def encoder(tower):
    return vg.recipes.glm4v(tower, BUDGETS, backend="tape")


def test_the_padding_contract_holds_for_images_videos_and_both(tower, encoder):
    layouts = [
        [(1, 16, 16)],  # all rows of the largest budget
        [(1, 2, 2)],  # the smallest item there is
        IMAGES,
        frames(VIDEO),
        VIDEO,
        [*VIDEO, *IMAGES[:2]],  # both in one call
        [(1, 8, 16)],  # exactly the smaller budget
        [(20, 2, 2)],  # more frames than items, and all segments
        [(1, 2, 2)] * 6,  # no item of padding
    ]
    check_padding_contract(encoder, original_by_frame(tower), pixels, "grid_thw", layouts, 1e-5)


SHARED_TOWER = glm4v_tower(seed=1)
SHARED = (
    vg.recipes.glm4v(SHARED_TOWER, [vg.budgets.Budget(256, items=4, segments=8)], backend="tape", verify=UNVERIFIED),
    SHARED_TOWER,
)


@settings(max_examples=25)
@given(strategies.grids(merge=2, max_items=8))
def test_any_call_equals_the_original(grid):
    encoder, tower = SHARED
    rows = pixels(grid)
    assert distance(encoder(rows, grid_thw=grid), original_by_frame(tower)(rows, grid)) < 1e-5


def test_the_call_and_the_output_are_the_towers_own(tower, encoder):
    encoder.stats.eager.clear()
    rows, grid = pixels(IMAGES), torch.tensor(IMAGES)
    expected = original_by_frame(tower)(rows, IMAGES)
    for output in (
        encoder(rows, grid_thw=grid),
        encoder(rows, grid),
        encoder(hidden_states=rows, grid_thw=grid),
        encoder.eager(rows, grid_thw=grid),
    ):
        assert type(output) is type(expected)
        assert distance(output, expected) < 1e-5
    if isinstance(expected, torch.Tensor):
        return  # transformers 4.57 takes nothing else, and records nothing
    assert distance(encoder(rows, grid_thw=grid, return_dict=True, output_router_logits=False), expected) < 1e-5
    assert not encoder.stats.eager
    as_tuple = encoder(rows, grid_thw=grid, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert distance(as_tuple, expected.to_tuple()) < 1e-5
    assert len(encoder(rows, grid_thw=grid, output_hidden_states=True).hidden_states) >= 3
    assert encoder.stats.eager == {"return_dict=False": 1}


def test_a_video_as_one_item_is_its_frames_one_by_one(tower, encoder):
    grid = [(3, 4, 6), (1, 8, 4), (2, 6, 6)]
    rows, singly = pixels(grid), original_by_frame(tower)
    if hasattr(tower, "embeddings"):
        with pytest.raises(IndexError):
            tower(rows, grid_thw=torch.tensor(grid))
    each = [h * w for _, h, w in frames(grid)]
    one_by_one = [singly(part, [frame]) for part, frame in zip(rows.split(each), frames(grid), strict=True)]
    expected = {name: torch.cat([tensors(one)[name] for one in one_by_one]) for name in tensors(one_by_one[0])}
    assert distance(tensors(encoder(rows, grid_thw=torch.tensor(grid))), expected) < 1e-5


@pytest.mark.parametrize("side", [8, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_position_embeddings_are_those_of_the_original(side, dtype):
    """Half-pixel centres, the border repeated, float32 inside, and rounded to the dtype of the table."""
    tower = glm4v_tower(image_size=4 * side, dtype=dtype)
    grid = torch.tensor([(1, 2, 2), (1, 24, 24), (1, 8, 8), (1, 16, 60), (1, 60, 4), (1, 10, 6)])
    torch.nn.init.normal_(tower.embeddings.position_embedding.weight)
    lengths = grid.prod(1)
    table = vg.layouts.ItemTable(grid, vg.budgets.Budget(int(lengths.sum()), items=len(grid)), vg.GridTHW(merge=2))
    _, h, w = table.positions("merge_block")
    with torch.no_grad():
        zeros = torch.zeros(table.budget.rows, 64, dtype=dtype)
        expected = tower.embeddings(zeros, lengths.tolist(), grid, h, w)
        entries = tower.embeddings.position_embedding.weight
        got = vg.buffers.interpolate_positions(entries, table, mode="bicubic", order="merge_block")
    assert got.dtype == expected.dtype == dtype
    one_step = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0
    torch.testing.assert_close(got, expected, rtol=one_step, atol=2e-5)


PATHS = [
    "patch_embed.proj", "post_conv_layernorm", "blocks.0.attn.qkv", "blocks.1.mlp.gate_proj", "blocks.2.norm2",
    "post_layernorm", "downsample", "merger.proj",
]  # fmt: skip


def test_heads_patches_and_the_table_of_the_real_size():
    """Two of the heads of GLM-4.1V-9B, of 128 channels, its patches of 14 x 14, and its table of 24 x 24."""
    real = {"hidden_size": 256, "num_heads": 2, "image_size": 336, "patch_size": 14, "out_hidden_size": 512}
    tower = glm4v_tower(depth=1, intermediate_size=512, initializer_range=0.01, **real)
    encoder = vg.recipes.glm4v(tower, [512], backend="tape", verify=UNVERIFIED)
    grid = [(1, 16, 16), (2, 10, 8)]
    rows = pixels(grid, row=3 * 2 * 14 * 14)
    assert distance(encoder(rows, grid_thw=grid), original_by_frame(tower)(rows, grid)) < 1e-5


class TestContract(RecipeContract):
    recipe, budgets, argument = staticmethod(vg.recipes.glm4v), [256], "grid_thw"
    families = tuple({"family": family} for family in GLM)
    tower, original = staticmethod(glm4v_tower), staticmethod(original_by_frame)
    adapted, hooked = PATHS, "blocks.1"

    def example(self):
        return pixels(IMAGES), IMAGES
