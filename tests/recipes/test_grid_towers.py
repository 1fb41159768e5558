"""Vision towers that read their grid on the host: Cosmos 3 Edge, GLM-Image, HunYuan-VL, LFM3-VL, VideoLLaMA 3."""

import copy
import functools

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import varlen_graphs as vg
from benchmarks.coverage import tiny
from tests.support import strategies
from tests.support.contract import check_half_precision, check_padding_contract
from tests.support.encoders import UNVERIFIED
from tests.support.grid_towers import FAMILIES, beside, grid_tower, original_of, recipe_of, rows_of, taken
from tests.support.towers import adapt, distance, equal_bits

BUDGETS = [vg.budgets.Budget(128, items=6, segments=8), vg.budgets.Budget(256, items=6, segments=20)]
MIXED = [(1, 8, 8), (3, 4, 6), (1, 2, 12)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@functools.cache
def shared(family):
    """Return a tower and its encoder, for tests that change neither."""
    tower = grid_tower(family)
    return tower, recipe_of(family)(tower, BUDGETS, backend="tape")


@pytest.fixture
def tower(family):
    return shared(family)[0]


@pytest.fixture
def encoder(family):
    return shared(family)[1]


def test_the_padding_contract_holds_for_images_videos_and_both(tower, encoder, family):
    layouts = [
        [(1, 16, 16)],  # all rows of the largest budget
        [(1, 2, 2)],
        MIXED,
        [(1, 8, 16)],  # exactly the smaller budget
        [(1, 2, 40), (1, 40, 2)],  # one line of tokens, and lines of one
        [(20, 2, 2)],  # more frames than items, and all segments
        [(1, 2, 2)] * 6,  # no item of padding
    ]
    check_padding_contract(
        encoder, original_of(tower, family), rows_of(family), "grid_thw",
        [taken(family, grid) for grid in layouts], 1e-5, more=lambda grid: beside(family, grid),
    )  # fmt: skip


@settings(max_examples=8)
@given(strategies.grids(merge=2, max_items=8))
def test_any_call_equals_the_original(family, grid):
    tower, encoder = shared(family)
    grid = taken(family, grid)
    rows, more = rows_of(family)(grid), beside(family, grid)
    assert distance(encoder(rows, grid_thw=grid, **more), original_of(tower, family)(rows, grid)) < 1e-5


@settings(max_examples=12)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)), max_size=4))
def test_any_merge_sizes_equal_the_original(items):
    """Odd sizes, too, which keep the one patch in the middle."""
    items = [(3, 1, 2, 2), *items]
    grid = [(t, merge * h, merge * w) for merge, t, h, w in items]
    sizes, rows = torch.tensor([merge for merge, *_ in items]), rows_of("video_llama3")(grid)
    with torch.no_grad():
        expected = MERGING(rows, grid_thw=torch.tensor(grid), merge_sizes=sizes)
    output = MERGED(rows, grid_thw=grid, merge_sizes=sizes)
    assert output.last_hidden_state.shape == expected.last_hidden_state.shape
    assert distance(output, expected) < 1e-5


MERGING = grid_tower("video_llama3", seed=1)
MERGED = vg.recipes.video_llama3(MERGING, [vg.budgets.Budget(256, items=4, segments=12)], backend="tape")


def test_the_call_and_the_output_are_the_towers_own(tower, encoder, family):
    grid = taken(family, MIXED)
    rows, more, original = rows_of(family)(grid), beside(family, grid), original_of(tower, family)
    expected = original(rows, grid)
    eager = encoder.stats.eager.copy()
    for output in (
        encoder(rows, torch.tensor(grid), **more),
        encoder(pixel_values=rows, grid_thw=torch.tensor(grid), **more),
        encoder(rows.double(), grid_thw=grid, **{name: value.tolist() for name, value in more.items()}),
        encoder.eager(rows, grid_thw=grid, **more),
    ):
        assert type(output) is type(expected)
        assert distance(output, expected) < 1e-5
    states = encoder(rows, grid_thw=grid, output_hidden_states=True, **more)
    assert len(states.hidden_states) == 4
    assert distance(states, original(rows, grid, output_hidden_states=True)) < 1e-5
    assert encoder.stats.eager == eager
    encoder(rows, grid_thw=torch.tensor(grid), output_attentions=True, **more)
    assert encoder.stats.eager - eager == {"output_attentions=True": 1}


def test_verify_finds_nothing(encoder, family):
    calls = [
        {"pixel_values": rows_of(family)(grid, seed), "grid_thw": torch.tensor(grid), **beside(family, grid)}
        for seed, grid in enumerate([taken(family, MIXED), [(1, 4, 4)]])
    ]
    encoder.verify(calls)


def test_graphs_are_proven_against_the_tower(encoder, family):
    grid = [(1, 8, 8)]
    encoder(rows_of(family)(grid), grid_thw=grid, **beside(family, grid))
    assert "verified against the module itself" in str(encoder.report())


def test_weights_that_change_in_place_are_followed(family):
    tower = grid_tower(family, seed=2)
    encoder = recipe_of(family)(tower, BUDGETS[:1], backend="tape", verify=UNVERIFIED)
    rows, more = rows_of(family)([(1, 8, 8)]), beside(family, [(1, 8, 8)])
    before = encoder(rows, grid_thw=[(1, 8, 8)], **more)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.mul_(0.9)
    after = encoder(rows, grid_thw=[(1, 8, 8)], **more)
    assert distance(after, before) > 0.01
    assert distance(after, original_of(tower, family)(rows, [(1, 8, 8)])) < 1e-5


PATHS = [
    ("glm_image", "blocks.1.attn.qkv"), ("glm_image", "blocks.2.mlp.fc1"),
    ("cosmos3_edge", "embeddings.patch_embedding"), ("hunyuan_vl", "patch_merger.proj_conv"),
    ("hunyuan_vl", "layers.1.self_attn.o_proj"), ("lfm3_vl", "layers.0.conv.spatial_conv"),
    ("lfm3_vl", "layers.1.self_attn.k_proj"), ("video_llama3", "embeddings.patch_embedding"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "path"), PATHS)
def test_adapters_are_called(family, path):
    tower = grid_tower(family)
    adapt(tower, path)
    encoder = recipe_of(family)(tower.eval(), BUDGETS[:1], backend="tape", verify=UNVERIFIED)
    grid = taken(family, MIXED)
    rows, more = rows_of(family)(grid), beside(family, grid)
    assert distance(encoder(rows, grid_thw=grid, **more), original_of(tower, family)(rows, grid)) < 1e-5


def test_half_precision_is_as_close_to_float32_as_the_original(family):
    tower = grid_tower(family, dtype=torch.bfloat16)
    exact = copy.deepcopy(tower).float()
    encoder = recipe_of(family)(tower, BUDGETS[1:], backend="tape", verify=UNVERIFIED)
    grid = taken(family, MIXED)
    rows, more = rows_of(family)(grid).bfloat16(), beside(family, grid)
    expected = original_of(exact, family)(rows.float(), grid)
    eager, output = original_of(tower, family)(rows, grid), encoder(rows, grid_thw=grid, **more)
    check_half_precision(output, eager, expected, torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "grid", "more", "message"),
    [
        ("cosmos3_edge", [(1, 3, 4)], {}, "h and w must be divisible by the merge size 2"),
        ("hunyuan_vl", [(1, 4, 4), (2, 4, 4)], {}, r"\(2, 4, 4\): expected images"),
        ("lfm3_vl", [(1, 4, 3)], {}, r"grid_thw\[0\]"),
        ("video_llama3", [(1, 4, 4), (1, 4, 6)], {"merge_sizes": [1, 4]}, r"\(1, 4, 6\) with merge_sizes 4: expected"),
        ("video_llama3", [(1, 4, 4)], {"merge_sizes": torch.tensor([0])}, "merge_sizes 0: expected a size of at least"),
        ("video_llama3", [(1, 4, 4)], {"merge_sizes": [1, 1]}, "expected one integer for each of 1 item"),
        ("video_llama3", [(1, 4, 4)], {}, "merge_sizes"),
    ],
)  # fmt: skip
def test_wrong_items_get_named_errors_and_harm_no_later_call(family, grid, more, message):
    tower, encoder = shared(family)
    rows = rows_of(family)
    with pytest.raises((vg.errors.InputError, vg.errors.LayoutError), match=message):
        encoder(rows(grid), grid_thw=grid, **more)
    right = [(1, 8, 8)]
    output = encoder(rows(right), grid_thw=right, **beside(family, right))
    assert distance(output, original_of(tower, family)(rows(right), right)) < 1e-5


def whole_model(family):
    """Return a tiny model of a family."""
    name = FAMILIES[family].whole
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    return tiny.make(name)


def test_whole_models_give_the_same_features(family):
    model = whole_model(family)
    tower = model.get_submodule(FAMILIES[family].path)
    grid = torch.tensor([(1, 8, 8), (1, 4, 12)])
    encoder = recipe_of(family)(tower, backend="eager")
    call = {"pixel_values": torch.randn(112, *encoder.spec.row_input.shape), "image_grid_thw": grid}
    call |= {f"image_{name}": value for name, value in beside(family, grid.tolist()).items()}
    with torch.no_grad():
        expected = model.model.get_image_features(**call)
        vg.wrap(model, [256], backend="tape", verify=UNVERIFIED)
        output = model.model.get_image_features(**call)
        again = model.model.get_image_features(**call)
    ((path, found),) = vg.encoders(model).items()
    assert path == FAMILIES[family].path
    assert not found.stats.eager
    assert distance(output, expected) < 1e-5
    assert equal_bits(again, output)


@pytest.mark.parametrize("kind", ["conv", "full_attention"])
def test_lfm3_vl_may_be_of_convolutions_or_of_attention_alone(kind):
    tower = grid_tower("lfm3_vl", layer_types=[kind] * 2, num_hidden_layers=2)
    encoder = vg.recipes.lfm3_vl(tower, BUDGETS, backend="tape", verify=vg.options.Verify(1, strict=True))
    rows = rows_of("lfm3_vl")(MIXED)
    expected = original_of(tower, "lfm3_vl")(rows, MIXED).last_hidden_state
    assert distance(encoder(rows, grid_thw=MIXED).last_hidden_state, expected) < 1e-5
    assert encoder.stats.replays.total() == 1
