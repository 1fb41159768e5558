"""The vision towers of Inkling, whose patches are alone, and Inkling 2, whose images have class tokens."""

import functools

import pytest
import torch
from hypothesis import given, settings

import varlen_graphs as vg
from benchmarks.coverage import tiny
from tests.support import strategies
from tests.support.contract import check_padding_contract
from tests.support.encoders import UNVERIFIED
from tests.support.inkling import inkling_tower, original_of, tokens_of
from tests.support.recipe_contract import RecipeContract
from tests.support.towers import distance

BUDGETS = [vg.budgets.Budget(48, items=5), vg.budgets.Budget(128, items=6)]
MIXED = [(1, 4, 4), (1, 3, 5), (1, 1, 7)]


@functools.cache
def shared():
    """Return a tower of Inkling 2 and its encoder, for tests that change neither."""
    tower = inkling_tower("inkling2")
    return tower, vg.recipes.inkling2(tower, BUDGETS, backend="tape")


def test_the_padding_contract_holds():
    tower, encoder = shared()
    layouts = [
        [(1, 8, 16)],  # all rows of the largest budget
        [(1, 1, 1)],
        MIXED,
        [(2, 3, 4), (1, 2, 2)],
        [(1, 6, 8)],  # exactly the smaller budget
        [(1, 1, 1)] * 6,  # no item of padding
    ]
    check_padding_contract(encoder, original_of(tower), tokens_of(), "image_grid_thw", layouts, 1e-5)


@settings(max_examples=8)
@given(strategies.grids(max_items=8, max_side=6, max_frames=2))
def test_any_call_equals_the_original(grid):
    tower, encoder = shared()
    rows = tokens_of()(grid)
    assert distance(encoder(rows, image_grid_thw=grid), original_of(tower)(rows, grid)) < 1e-5


def test_the_call_and_the_output_are_the_towers_own():
    tower, encoder = shared()
    rows, grid, eager = tokens_of()(MIXED), torch.tensor(MIXED), encoder.stats.eager.copy()
    expected = original_of(tower)(rows, MIXED)
    for output in (encoder(rows, grid), encoder(pixel_values=rows, image_grid_thw=grid), encoder.eager(rows, grid)):
        assert type(output) is type(expected)
        assert output.last_hidden_state.shape == (4 * 38 + 3, 32)
        assert distance(output, expected) < 1e-5
    states = encoder(rows, grid, output_hidden_states=True)
    assert len(states.hidden_states) == 4
    assert distance(states, original_of(tower)(rows, MIXED, output_hidden_states=True)) < 1e-5
    assert encoder.stats.eager == eager
    encoder(rows, grid, output_attentions=True)
    assert encoder.stats.eager - eager == {"output_attentions=True": 1}


def test_verify_finds_nothing_and_graphs_are_proven_against_the_tower():
    _, encoder = shared()
    encoder.verify([{"pixel_values": tokens_of()(MIXED), "image_grid_thw": torch.tensor(MIXED)}])
    assert "verified against the module itself" in str(encoder.report())


@pytest.mark.parametrize("grid", [[(1, 0, 4)], [(1, 4, 4), (1, -1, 2)], [(1, 4)], []])
def test_wrong_items_get_errors(grid):
    _, encoder = shared()
    with pytest.raises((vg.errors.InputError, vg.errors.LayoutError)):
        encoder(tokens_of()([(1, 4, 4)]), image_grid_thw=grid)


def test_patches_of_inkling_are_a_batch():
    tower = inkling_tower("inkling")
    calls = [torch.randn(count, 2, 4, 4, 3) for count in (70, 1, 128, 16)]
    expected = [tower(x) for x in calls]
    vg.wrap(tower, backend="tape")
    for x, own in zip(calls, expected, strict=True):
        assert distance(tower(x), own) < 1e-5
        vg.encoders(tower)[""].poison()
        assert distance(tower(x), own) < 1e-5
    encoder = vg.encoders(tower)[""]
    assert encoder.budgets[-1].items == 128  # as many as the first call needs
    encoder.verify([{"pixel_values": torch.randn(3, 2, 4, 4, 3)}])
    assert not encoder.stats.eager


def test_whole_models_give_the_same_features():
    pytest.importorskip("transformers.models.inkling2")
    model, grid = tiny.make("Inkling2ForConditionalGeneration"), torch.tensor([(1, 3, 4), (1, 2, 2)])
    size = model.config.vision_config.patch_size * 2
    rows = torch.randn(16, size, size, 3)
    with torch.no_grad():
        expected = model.model.get_image_features(rows, grid)
        vg.wrap(model, [16], backend="tape", verify=UNVERIFIED)
        output = model.model.get_image_features(rows, grid)
    assert vg.encoders(model)["model.vision_tower"].stats.replays.total() == 1
    assert all(distance(*pair) < 1e-5 for pair in zip(output.pooler_output, expected.pooler_output, strict=True))


class TestContract(RecipeContract):
    recipe, budgets, argument = staticmethod(vg.recipes.inkling2), BUDGETS[:1], "image_grid_thw"
    tower, original = staticmethod(functools.partial(inkling_tower, "inkling2")), staticmethod(original_of)
    adapted, hooked = ("layers.1.self_attn.k_proj", "merger.linear_1"), "layers.1"

    def example(self):
        return tokens_of()(MIXED), MIXED
