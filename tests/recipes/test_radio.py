"""C-RADIO: packed images of any size, and batches of one size."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.support.contract import check_padding_contract
from tests.support.encoders import UNVERIFIED, wait_for
from tests.support.radio import ROW, patches, radio_original, radio_tower
from tests.support.recipe_contract import RecipeContract
from tests.support.towers import distance, equal_bits

BUDGETS = [vg.budgets.Budget(64, items=4), vg.budgets.Budget(128, items=8)]
SHAPES = [(4, 6), (9, 2), (5, 5)]


@functools.cache
def shared():
    """Return a tower and its encoder, for tests that change neither."""
    tower = radio_tower()
    return tower, vg.recipes.radio(tower, BUDGETS, backend="tape")


def test_the_padding_contract_holds():
    tower, encoder = shared()
    layouts = [[(8, 16)], [(1, 1)], SHAPES, [(7, 7)], [(4, 16)], [(2, 3)] * 8, [(1, 60), (40, 1)]]
    original = radio_original(tower)
    check_padding_contract(encoder, original, patches, "image_grid_hw", layouts, 1e-5)


sizes = st.tuples(st.integers(1, 12), st.integers(1, 12))


@settings(max_examples=10)
@given(st.lists(sizes, min_size=1, max_size=8), st.booleans())
def test_any_call_equals_the_original(shapes, asks):
    tower, encoder = shared()
    rows, asked = patches(shapes), {"output_hidden_states": True} if asks else {}
    expected = radio_original(tower)(rows, shapes, **asked)
    assert distance(encoder(rows, image_grid_hw=torch.tensor(shapes), **asked), expected) < 1e-5


def test_the_call_and_the_output_are_the_towers_own():
    tower, encoder = shared()
    rows = patches(SHAPES)
    expected = radio_original(tower)(rows, SHAPES)
    for output in (
        encoder(rows, SHAPES),
        encoder(pixel_values=rows, image_grid_hw=SHAPES),
        encoder.eager(rows, SHAPES),
    ):
        assert type(output) is type(expected)
        assert distance(output, expected) < 1e-5
    assert "verified against the module itself" in encoder.report()
    encoder.verify([{"pixel_values": rows, "image_grid_hw": torch.tensor(SHAPES)}])


def test_batches_of_images_and_of_videos_replay_graphs_of_their_own():
    tower = radio_tower()
    tower.make_preprocessor_external()  # as Nemotron Omni does, whose videos have the channels of several frames
    encoder = vg.recipes.radio(tower, BUDGETS, backend="tape", verify=UNVERIFIED)
    for channels in (3, 6):
        batch = torch.randn(3, channels, 16, 24)
        with torch.no_grad():
            assert distance(encoder(batch), tower(batch)) < 1e-5
            encoder.poison()
            assert distance(encoder(batch, output_hidden_states=True), tower(batch, output_hidden_states=True)) < 1e-5
    assert encoder.batches.stats.replays.total() == 4
    assert not encoder.batches.stats.eager
    assert not encoder.stats.eager
    encoder.release()
    assert "0 captured" in encoder.report() + encoder.batches.report()


@pytest.mark.parametrize("in_background", [False, True])
def test_a_lazy_encoder_captures_for_batches_too(in_background):
    encoder = vg.recipes.radio(
        radio_tower(), BUDGETS, backend="tape", capture=vg.options.Capture(lazy=True), verify=UNVERIFIED
    )
    batch = torch.randn(3, 3, 16, 24)
    encoder(batch)
    assert "1 eager run: not captured yet" in encoder.report()
    if in_background:
        future = encoder.capture_in_background()
        wait_for(encoder.batches, [budget for budget in encoder.batches.budgets if budget.items == 4])
        assert future.cancel()
    else:
        assert encoder.capture_pending()
    encoder(batch)
    assert encoder.batches.stats.replays.total() == 1


def test_the_tower_answers_batches_that_no_graph_can():
    tower = radio_tower(drop_path_rate=0.5).train()
    encoder = vg.recipes.radio(tower, BUDGETS, backend="tape", verify=UNVERIFIED)
    assert encoder.batches is None
    tower.eval()
    batch = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert distance(encoder(batch), tower(batch)) == 0
    ((reason, count),) = encoder.stats.eager.items()
    assert reason.startswith("a batch: RadioModel cannot be graphed by batch")
    assert count == 1


@pytest.mark.parametrize(
    ("rows", "shapes", "message"),
    [
        (patches([(2, 3)]), [(2, 4)], "image_grid_hw"),
        (patches([(2, 3)]), [(2, -1), (2, 3)], r"image_grid_hw\[0\]"),
        (patches([(2, 3)]), [(1, 2, 3)], r"image_grid_hw\[0\] is .* expected two integers"),
        (torch.randn(6, 2 * ROW), [(2, 3)], r"pixel_values is \[6, 96\]"),
    ],
)  # fmt: skip
def test_wrong_input_gets_named_errors(rows, shapes, message):
    _, encoder = shared()
    with pytest.raises((vg.errors.InputError, vg.errors.LayoutError), match=message):
        encoder(rows, image_grid_hw=shapes)


def test_wrap_serves_both_forms_inside_of_a_model():
    model = nn.ModuleDict({"vision_model": radio_tower(), "head": nn.Linear(2, 2)})
    tower, batch = model["vision_model"], torch.randn(2, 3, 16, 16)
    original = radio_original(tower)
    with torch.no_grad():
        expected, of_batch = original(patches(SHAPES), SHAPES), tower(batch)
        vg.wrap(model, BUDGETS, backend="tape", verify=UNVERIFIED)
        output = original(patches(SHAPES), SHAPES)
        assert distance(output, expected) < 1e-5
        assert distance(tower(batch), of_batch) < 1e-5
    encoder = vg.encoders(model)["vision_model"]
    assert (encoder.stats.replays.total(), encoder.batches.stats.replays.total()) == (1, 1)
    assert not encoder.stats.eager
    assert not encoder.batches.stats.eager
    vg.unwrap(model)
    assert equal_bits(original(patches(SHAPES), SHAPES), expected)


class TestContract(RecipeContract):
    recipe, budgets, argument = staticmethod(vg.recipes.radio), BUDGETS[1:], "image_grid_hw"
    tower, original = staticmethod(radio_tower), staticmethod(radio_original)
    adapted = (
        "embeddings.patch_projection", "encoder.layer.0.attention.k_proj", "encoder.layer.1.layer_scale1",
        "encoder.layer.2.mlp.fc1",
    )  # fmt: skip
    hooked = "encoder.layer.1"

    def example(self):
        return patches(SHAPES), SHAPES
