"""`vg.recipes.qwen3_vl`: the vision towers of Qwen3-VL and its relatives, and our attention inside of them."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings

import varlen_graphs as vg
from tests.support import strategies
from tests.support.contract import check_padding_contract
from tests.support.encoders import UNVERIFIED
from tests.support.recipe_contract import RecipeContract
from tests.support.towers import FAMILIES, ROW, distance, original_of, pixels, qwen3_vl_tower
from varlen_graphs.attention.transformers import ATTENTION, use_attention

IMAGES = [(1, 8, 8), (1, 6, 10), (1, 2, 2)]
VIDEO = [(5, 4, 6)]


@pytest.fixture(scope="module", params=FAMILIES)
def tower(request):
    return qwen3_vl_tower(family=request.param)


@pytest.fixture(scope="module")
def encoder(tower):
    budgets = [vg.budgets.Budget(128, items=6, segments=8), vg.budgets.Budget(256, items=6, segments=20)]
    return vg.recipes.qwen3_vl(tower, budgets, backend="tape")


def test_the_padding_contract_holds_for_images_videos_and_both(tower, encoder):
    layouts = [
        [(1, 16, 16)],  # all rows of the largest budget
        [(1, 2, 2)],  # the smallest item there is
        IMAGES,
        VIDEO,
        [*VIDEO, *IMAGES[:2]],  # both in one call
        [(1, 8, 16)],  # exactly the smaller budget
        [(20, 2, 2)],  # more frames than items, and all segments
        [(1, 2, 2)] * 6,  # no item of padding
    ]
    check_padding_contract(encoder, original_of(tower), pixels, "grid_thw", layouts, 1e-5)


@settings(max_examples=25)
@given(strategies.grids(merge=2, max_items=8))
def test_any_call_equals_the_original(grid):
    encoder, tower = SHARED
    rows = pixels(grid)
    assert distance(encoder(rows, grid_thw=grid), original_of(tower)(rows, grid)) < 1e-5


SHARED_TOWER = qwen3_vl_tower(seed=1)
SHARED = (
    vg.recipes.qwen3_vl(SHARED_TOWER, [vg.budgets.Budget(256, items=4, segments=8)], backend="tape", verify=UNVERIFIED),
    SHARED_TOWER,
)


def test_the_call_and_the_output_are_the_towers_own(tower, encoder):
    encoder.stats.eager.clear()
    rows, grid = pixels(IMAGES), torch.tensor(IMAGES)
    expected = original_of(tower)(rows, IMAGES)
    for output in (
        encoder(rows, grid_thw=grid),
        encoder(rows, grid),
        encoder(hidden_states=rows, grid_thw=grid, return_dict=True),
        encoder(rows, grid_thw=grid, output_hidden_states=None),
        encoder.eager(rows, grid_thw=grid),
    ):
        assert type(output) is type(expected)
        assert isinstance(output[-1], list) is hasattr(tower, "deepstack_merger_list")
        assert distance(output, expected) < 1e-5
    assert not encoder.stats.eager
    if isinstance(expected, tuple):
        return  # transformers 4.57 has nothing but tuples
    as_tuple = encoder(rows, grid_thw=grid, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert distance(as_tuple, expected.to_tuple()) < 1e-5
    assert encoder.stats.eager == {"return_dict=False": 1}


def test_one_image_in_a_graph_captured_for_videos_is_alone(tower):
    """The tail of cu_seqlens repeats its last value: a tail of zeros would be a segment of negative length."""
    encoder = vg.recipes.qwen3_vl(
        tower, [vg.budgets.Budget(256, items=2, segments=40)], backend="tape", verify=UNVERIFIED
    )
    encoder(pixels([(10, 4, 4)]), grid_thw=[(10, 4, 4)])
    rows = pixels([(1, 6, 6)])
    assert distance(encoder(rows, grid_thw=[(1, 6, 6)]), original_of(tower)(rows, [(1, 6, 6)])) < 1e-5


def test_hidden_states_are_graphed_where_the_original_records_them(tower, encoder):
    rows, grid, replays = pixels(IMAGES), torch.tensor(IMAGES), encoder.stats.replays.total()
    encoder.stats.eager.clear()
    output = encoder(rows, grid_thw=grid, output_hidden_states=True)
    recorded = not isinstance(output, tuple)  # transformers 4.57 records none
    if recorded:
        expected = tower(rows, grid_thw=grid, output_hidden_states=True)
        assert distance(output, expected) < 1e-5
        assert list(output) == list(expected)
    assert encoder.stats.eager == ({} if recorded else {"output_hidden_states=True": 1})
    encoder(rows, grid_thw=grid)  # transformers left its hooks behind: they do nothing, so graphs may go on
    assert encoder.stats.replays.total() == replays + 1 + recorded


def test_arguments_of_the_tower_that_the_recipe_does_not_take_run_the_original(encoder):
    encoder.stats.eager.clear()
    encoder(pixels(IMAGES), grid_thw=IMAGES, use_cache=True)
    assert not encoder.stats.eager
    encoder(pixels(IMAGES), grid_thw=IMAGES, is_last=False)  # a list, which the tower itself does not take
    assert encoder.stats.eager == {"argument 'is_last'": 1}


@pytest.mark.skipif(not find_spec("transformers.vision_utils"), reason="towers of transformers 4.57 take no buffers")
def test_an_unmodified_tower_is_graphed_from_declared_buffers(tower):
    """Towers that take what they need as arguments need no recipe, only an attention that takes cu_seqlens."""
    merged = vg.outputs.Rows(every=4)
    deepstack = {"deepstack_features": merged} if hasattr(tower, "deepstack_merger_list") else {}
    interpolation = {"entries": 64, "align_corners": True, "order": "merge_block"}
    spec = vg.BufferSpec(
        rows=vg.inputs.Rows("hidden_states", shape=(ROW,)),
        layout=vg.GridTHW(merge=2),
        buffers=[
            vg.buffers.CuSeqlens(per="frame"),
            vg.buffers.MaxSeqlen(per="frame"),
            vg.buffers.GridPositions("position_ids", order="merge_block"),
            vg.buffers.InterpolationIndices(**interpolation),
            vg.buffers.InterpolationWeights(**interpolation),
        ],
        outputs=vg.outputs.Fields(last_hidden_state=vg.outputs.Rows(), pooler_output=merged, **deepstack),
    )

    def forward(tower, **arguments):
        with use_attention(tower):
            return tower(**arguments)

    encoder = vg.GraphedEncoder(tower, [128, 256], spec, forward=forward, backend="tape")
    layouts = [[(1, 16, 16)], [(1, 2, 2)], [*VIDEO, *IMAGES[:2]]]
    check_padding_contract(encoder, original_of(tower), pixels, "grid_thw", layouts, 1e-5)


def test_our_attention_is_used_inside_the_block_and_not_after_it(tower):
    before = tower.config._attn_implementation
    with use_attention(tower):
        assert tower.config._attn_implementation in (ATTENTION, "flash_attention_2")  # the latter in transformers 4.57
        inside = original_of(tower)(pixels(IMAGES), IMAGES)
    assert tower.config._attn_implementation == before
    assert distance(inside, original_of(tower)(pixels(IMAGES), IMAGES)) < 1e-5


def test_the_parts_of_a_model_get_their_own_attention_back():
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig

    config = Qwen3VLConfig()
    config._attn_implementation = "sdpa"
    config.vision_config._attn_implementation = "eager"
    with use_attention(SimpleNamespace(config=config)):
        assert config.vision_config._attn_implementation in (ATTENTION, "flash_attention_2")
    parts = config, config.vision_config, config.text_config
    assert [part._attn_implementation for part in parts] == ["sdpa", "eager", "sdpa"]


def test_our_attention_refuses_what_is_not_packed():
    from varlen_graphs.attention.transformers import flash_attention

    q, cu_seqlens = torch.zeros(1, 1, 4, 8), torch.tensor([0, 4], dtype=torch.int32)
    expected = r"expected packed rows \[1, heads, rows, head_dim\] with cu_seq_lens_q"
    assert flash_attention(None, q, q, q, cu_seq_lens_q=cu_seqlens, sliding_window=None, dropout=0.0)[0].shape == (
        1,
        4,
        1,
        8,
    )
    with pytest.raises(vg.errors.InputError, match=expected):
        flash_attention(None, q, q, q)
    with pytest.raises(vg.errors.InputError, match=expected):
        flash_attention(None, q.expand(2, -1, -1, -1), q, q, cu_seq_lens_q=cu_seqlens)
    for option in ({"softcap": 30.0}, {"s_aux": q}, {"dropout": 0.1}):
        with pytest.raises(vg.errors.InputError, match=f"{next(iter(option))}.*{expected}"):
            flash_attention(None, q, q, q, cu_seq_lens_q=cu_seqlens, **option)
    with pytest.raises(vg.errors.InputError, match=f"cu_seq_lens_k.*{expected}"):
        flash_attention(None, q, q, q, cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens.clone())


class TestContract(RecipeContract):
    recipe, budgets, argument = staticmethod(vg.recipes.qwen3_vl), [256], "grid_thw"
    families = ({"seed": 0}, {"seed": 1})
    tower, original = staticmethod(qwen3_vl_tower), staticmethod(original_of)
    adapted, hooked = ("patch_embed.proj", "blocks.0.attn.qkv", "blocks.1.mlp.linear_fc1", "blocks.2.norm1"), "blocks.1"

    def example(self):
        return pixels(IMAGES), IMAGES
