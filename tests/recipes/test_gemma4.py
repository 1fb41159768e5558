"""The vision tower of Gemma 4: padded batches of patches with their positions, packed on their way in."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support.contract import check_padding_contract
from tests.support.encoders import UNVERIFIED
from tests.support.pictures import GEMMA4, IMAGE, WORDS, build, patch_positions, position_rows
from tests.support.recipe_contract import RecipeContract
from tests.support.towers import distance

BUDGETS = [vg.budgets.Budget(64, items=4), vg.budgets.Budget(128, items=8), vg.budgets.Budget(256, items=6)]
ONE = BUDGETS[1:2]
SIZES = [(4, 6), (2, 2), (8, 6)]


def gemma4_tower(seed=0, dtype=torch.float32, **changes):
    return build("gemma4", "Gemma4VisionConfig", "Gemma4VisionModel", dtype, seed, **(GEMMA4 | changes))


def original(tower, **asked):
    """Run the tower itself; what it gives for padding means nothing, and becomes zeros."""

    def run(rows, positions):
        with torch.no_grad():
            output = tower(rows.nan_to_num(), positions, **asked)
        if asked.get("output_hidden_states"):
            real = (positions >= 0).all(-1, keepdim=True)
            output.hidden_states = tuple(x * real if x.dim() == 3 else x for x in output.hidden_states)
        return output

    return run


@pytest.fixture(scope="module")
def tower():
    return gemma4_tower(seed=1)


@pytest.fixture(scope="module")
def shared(tower):
    return vg.recipes.gemma4(tower, BUDGETS, backend="tape")


def test_the_padding_contract_holds(tower, shared):
    layouts = [[(8, 16), (16, 8)], [(2, 2)], SIZES, [(4, 16)], [(2, 4)] * 8, [(2, 32), (6, 14)]]
    positions = [patch_positions(sizes) for sizes in layouts]
    check_padding_contract(shared, original(tower), position_rows, "pixel_position_ids", positions, 1e-5)


sizes_of_images = st.integers(1, 16).flatmap(
    lambda height: st.tuples(st.just(height), st.integers(1, min(16, 32 // height)))
)


@settings(max_examples=20, deadline=None)
@given(st.lists(sizes_of_images, min_size=1, max_size=10), st.integers(0, 3))
def test_any_call_equals_the_original_however_it_is_padded_and_split(tower, shared, sizes, more):
    sizes = [(2 * h, 2 * w) for h, w in sizes]
    positions = patch_positions(sizes, max(h * w for h, w in sizes) + 4 * more)
    rows = position_rows(positions)
    expected = original(tower, output_hidden_states=True)(rows, positions)
    assert distance(shared(rows, positions, output_hidden_states=True), expected) < 1e-5
    assert distance(shared.eager(rows, positions, output_hidden_states=True), expected) < 1e-5


@pytest.mark.parametrize(
    "changes", [{}, {"standardize": True, "use_clipped_linears": True, "num_key_value_heads": 2, "head_dim": 16},
                {"pooling_kernel_size": 3}], ids=str,
)  # fmt: skip
def test_the_call_and_the_output_are_the_towers_own(changes):
    tower = gemma4_tower(**changes)
    if "standardize" in changes:
        tower.std_bias.normal_()
        tower.std_scale.normal_()
        tower.encoder.layers[1].mlp.up_proj.output_max.fill_(0.5)
    encoder = vg.recipes.gemma4(tower, ONE, backend="tape")
    sizes = [(6, 6), (6, 12)]
    positions = patch_positions(sizes, 72 + 36)
    rows = position_rows(positions)
    expected = original(tower)(rows, positions)
    for output in (
        encoder(rows, positions),
        encoder(pixel_values=rows, pixel_position_ids=positions.int(), return_dict=True),
        encoder(rows.double(), pixel_position_ids=[*positions]),
    ):
        assert output.last_hidden_state.shape == (108 // tower.config.pooling_kernel_size**2, 32)
        assert distance(output.last_hidden_state, expected.last_hidden_state) < 1e-5
    assert not encoder.stats.eager
    assert "verified against the module itself" in str(encoder.report())
    assert "largest error" in str(
        encoder.verify([{"pixel_values": rows.nan_to_num(), "pixel_position_ids": positions}])
    )


def test_what_a_batch_is_padded_to_is_not_computed(shared):
    rows, padding = shared.stats.rows, shared.stats.padding
    positions = patch_positions([(4, 6), (2, 2)], 4096)
    shared(position_rows(positions), positions)
    assert (shared.stats.rows - rows, shared.stats.padding - padding) == (28, 64 - 28)


POSITIONS = patch_positions(SIZES)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows": position_rows(POSITIONS)[0]}, vg.errors.InputError, r"pixel_values is \[48, 48\]: expected \[batch, length, 48\]"),
        ({"positions": POSITIONS[:2]}, vg.errors.LayoutError, "pixel_position_ids describes 2 items"),
        ({"positions": POSITIONS[:, :40]}, vg.errors.LayoutError, r"\[2\] has other positions than those of an image"),
        ({"positions": patch_positions(SIZES, 60)}, vg.errors.LayoutError, "has 60 positions for each image, but the rows are"),
        ({"positions": POSITIONS.flip(1)}, vg.errors.LayoutError, r"\[0\] has other positions than those of an image: expected"),
        ({"positions": POSITIONS.flip(2)}, vg.errors.LayoutError, r"\[0\] has other positions"),
        ({"positions": patch_positions([(4, 6), (3, 2), (8, 6)])}, vg.errors.LayoutError, r"\[1\] has 3 x 2 patches: expected sides"),
        ({"positions": POSITIONS.float()}, vg.errors.LayoutError, r"is torch.float32 \[3, 48, 2\]: expected a tensor of integers"),
        ({"positions": None}, vg.errors.InputError, "argument 'pixel_position_ids' is missing"),
        ({"rows": torch.rand(1, 132, 48), "positions": patch_positions([(2, 66)])}, vg.errors.LayoutError, "has a size of 66, but buffer"),
    ],
)  # fmt: skip
def test_wrong_input_gets_named_errors(shared, change, error, message):
    arguments = {"rows": position_rows(POSITIONS), "positions": POSITIONS} | change
    with pytest.raises(error, match=message):
        shared(*arguments.values())


def test_attentions_come_from_the_original():
    tower = gemma4_tower()
    tower.set_attn_implementation("eager")
    encoder = vg.recipes.gemma4(tower, ONE, backend="tape", verify=UNVERIFIED)
    rows = position_rows(POSITIONS).nan_to_num()
    encoder(rows, POSITIONS, output_attentions=True)
    assert encoder.stats.eager == {"output_attentions=True": 1}


def test_the_whole_model_replays_and_equals_eager():
    model = build(
        "gemma4", "Gemma4Config", "Gemma4ForConditionalGeneration", image_token_id=IMAGE, video_token_id=191,
        vision_config=GEMMA4, audio_config=None,
        text_config=WORDS | {"global_head_dim": 8, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    )  # fmt: skip
    rows = position_rows(POSITIONS).nan_to_num()
    ids = torch.tensor([[1, 5, *[IMAGE] * 19, 7, 8]])
    call = {"input_ids": ids, "pixel_values": rows, "image_position_ids": POSITIONS}
    call["mm_token_type_ids"] = (ids == IMAGE).long()

    def run():
        with torch.no_grad():
            images = model.model.get_image_features(rows, POSITIONS).pooler_output
            return *images, model(**call).logits

    expected = run()
    vg.wrap(model, ONE, backend="tape", verify=UNVERIFIED)
    assert distance(run(), expected) < 1e-4
    ((path, encoder),) = vg.encoders(model).items()
    assert vg.encoders(model).how == {path: "gemma4"}
    assert path == "model.vision_tower"
    assert encoder.stats.replays.total() == 2
    assert not encoder.stats.eager


class TestContract(RecipeContract):
    recipe, budgets, argument = staticmethod(vg.recipes.gemma4), ONE, "pixel_position_ids"
    tower = staticmethod(gemma4_tower)
    adapted = (
        "patch_embedder.input_proj", "encoder.layers.0.self_attn.q_proj.linear", "encoder.layers.1.self_attn.k_norm",
        "encoder.layers.1.mlp.down_proj.linear", "encoder.layers.2.post_feedforward_layernorm",
    )  # fmt: skip
    hooked = "encoder.layers.1"

    def example(self):
        return position_rows(POSITIONS), POSITIONS

    def original(self, tower):
        return original(tower)
