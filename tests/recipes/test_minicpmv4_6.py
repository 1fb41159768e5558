"""The vision tower of MiniCPM-V 4.6: strips of patches, merged in windows between two layers."""

import functools
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import varlen_graphs as vg
from benchmarks.coverage import tiny
from tests.support.contract import check_padding_contract
from tests.support.encoders import UNVERIFIED
from tests.support.minicpm46 import original_of, strip_tower, strips_of
from tests.support.recipe_contract import RecipeContract
from tests.support.towers import distance

BUDGETS = [vg.budgets.Budget(48, items=5), vg.budgets.Budget(128, items=6)]
MIXED = [(4, 4), (2, 10), (6, 2)]


@functools.cache
def shared():
    """Return a tower and its encoder, for tests that change neither."""
    tower = strip_tower()
    return tower, vg.recipes.minicpmv4_6(tower, BUDGETS, backend="tape")


def test_the_padding_contract_holds():
    tower, encoder = shared()
    layouts = [
        [(8, 16)],  # all rows of the largest budget
        [(2, 2)],
        MIXED,
        [(6, 8)],  # exactly the smaller budget
        [(2, 2)] * 6,  # no slice of padding
        [(2, 62), (2, 2)],
    ]
    check_padding_contract(encoder, original_of(tower), strips_of(), "target_sizes", layouts, 1e-5)


SIDES = st.sampled_from([2, 4, 6, 8, 14, 18, 34])


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=4))
def test_any_call_equals_the_original(sizes):
    tower, encoder = shared()
    strip = strips_of()(sizes)
    assert distance(encoder(strip, target_sizes=sizes), original_of(tower)(strip, sizes)) < 1e-5


def test_the_call_and_the_output_are_the_towers_own():
    tower, encoder = shared()
    strip, sizes, eager = strips_of()(MIXED), torch.tensor(MIXED), encoder.stats.eager.copy()
    expected = original_of(tower)(strip, MIXED)
    for output in (encoder(strip, sizes), encoder(strip, target_sizes=sizes, use_vit_merger=True)):
        assert type(output) is type(expected)
        assert output.last_hidden_state.shape == (1, 12, 32)
        assert distance(output, expected) < 1e-5
    states = encoder(strip, sizes, output_hidden_states=True)
    assert len(states.hidden_states) == 5
    assert distance(states, original_of(tower)(strip, MIXED, output_hidden_states=True)) < 1e-5
    assert encoder.stats.eager == eager


def test_calls_that_merge_no_windows_have_graphs_of_their_own():
    tower, encoder = shared()
    strip, sizes = strips_of()(MIXED), torch.tensor(MIXED)
    for asked in ({}, {"output_hidden_states": True}):
        whole = encoder(strip, sizes, use_vit_merger=False, **asked)
        expected = original_of(tower)(strip, MIXED, use_vit_merger=False, **asked)
        assert type(whole) is type(expected)
        assert distance(whole, expected) < 1e-5
    assert distance(encoder(strip, sizes, False), original_of(tower)(strip, MIXED, use_vit_merger=False)) < 1e-5
    assert distance(encoder(strip, sizes, True), original_of(tower)(strip, MIXED)) < 1e-5
    assert encoder.whole.stats.replays.total() == 3
    assert not encoder.whole.stats.eager
    run = original_of(tower)
    check_padding_contract(
        encoder.whole, lambda rows, sizes: run(rows, sizes, use_vit_merger=False), strips_of(), "target_sizes",
        [[(8, 16)], [(2, 2)], MIXED, [(6, 8)]], 1e-5,
    )  # fmt: skip


def test_verify_finds_nothing_and_graphs_are_proven_against_the_tower():
    _, encoder = shared()
    encoder.verify([{"pixel_values": strips_of()(MIXED), "target_sizes": torch.tensor(MIXED)}])
    assert "verified against the module itself" in str(encoder.report())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([(3, 4)], r"target_sizes\[0\] is \(3, 4\): h and w must be divisible by the merge size 2"),
        ([(4, 4), (2, -1)], "every size must be at least 0"),
        ([(4, 6)], "16 rows"),
        ([], "empty"),
    ],
)
def test_wrong_sizes_get_errors(sizes, message):
    with pytest.raises((vg.errors.InputError, vg.errors.LayoutError), match=message):
        shared()[1](strips_of()([(4, 4)]), target_sizes=sizes)


def test_strips_of_another_form_get_errors():
    _, encoder = shared()
    expected = r"expected \[1, 3, 4, rows \* 4\]"
    for strip in (torch.randn(1, 3, 4, 6), torch.randn(16, 3, 4, 4), torch.randn(1, 3, 64)):
        with pytest.raises(vg.errors.InputError, match=expected):
            encoder(strip, target_sizes=[(2, 2)])
    with pytest.raises(vg.errors.InputError, match="pixel_values is a strip"), encoder.stage([(2, 2)]):
        pass


def test_layers_that_nothing_follows_are_refused():
    with pytest.raises(
        vg.errors.SpecError, match=r"after layer 3 of 4: expected 2 x 2, and a layer before the last one"
    ):
        vg.recipes.minicpmv4_6(strip_tower(insert_layer_id=3))


def test_whole_models_give_the_same_features():
    pytest.importorskip("transformers.models.minicpmv4_7")
    model, sizes = tiny.make("MiniCPMV4_7ForConditionalGeneration"), torch.tensor([(4, 8), (4, 4)])
    patch = model.config.vision_config.patch_size
    strip = torch.randn(1, 3, patch, 48 * patch)
    with torch.no_grad():
        expected = model.model.get_image_features(strip, sizes)
        frames = model.model.get_video_features(strip, sizes)
        vg.wrap(model, [64], backend="tape", verify=UNVERIFIED)
        output = model.model.get_image_features(strip, sizes)
        assert distance(model.model.get_video_features(strip, sizes).last_hidden_state, frames.last_hidden_state) < 1e-5
    assert vg.encoders(model)["model.vision_tower"].stats.replays.total() == 2
    assert all(distance(*pair) < 1e-5 for pair in zip(output.pooler_output, expected.pooler_output, strict=True))


def test_a_tower_that_merges_all_slices_at_one_size_is_refused(monkeypatch):
    tower = strip_tower()
    modeling = sys.modules[type(tower.vit_merger).__module__]
    monkeypatch.setattr(modeling, "get_vision_merged_shape", None, raising=False)  # as transformers 5.17 has it
    with pytest.raises(
        vg.errors.SpecError, match="merges all slices of a call as though they had the size of the first one"
    ):
        vg.recipes.minicpmv4_6(tower, BUDGETS, backend="tape")


class TestContract(RecipeContract):
    recipe, budgets, argument = staticmethod(vg.recipes.minicpmv4_6), BUDGETS[:1], "target_sizes"
    tower, original = staticmethod(strip_tower), staticmethod(original_of)
    adapted = "encoder.layers.1.self_attn.k_proj", "vit_merger.linear_1", "vit_merger.self_attn.q_proj"
    hooked = "encoder.layers.1"

    def example(self):
        return strips_of()(MIXED), MIXED
