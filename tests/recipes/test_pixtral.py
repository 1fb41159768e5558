"""Pixtral's vision tower: pictures of several sizes, packed on their way in."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support.contract import check_padding_contract
from tests.support.encoders import UNVERIFIED
from tests.support.pictures import IMAGE, TINY, WORDS, build, pictures, pixels
from tests.support.recipe_contract import RecipeContract
from tests.support.towers import distance

BUDGETS = [vg.budgets.Budget(64, items=4), vg.budgets.Budget(128, items=8), vg.budgets.Budget(256, items=6)]
ONE = BUDGETS[1:2]
SIZES = [(3, 5), (2, 2), (8, 6)]


def pixtral_tower(**options):
    return build("pixtral", "PixtralVisionConfig", "PixtralVisionModel", **options, **TINY)


TOWER = pixtral_tower(seed=1)
SHARED = vg.recipes.pixtral(TOWER, BUDGETS, backend="tape")


def original(tower, **asked):
    def run(rows, sizes):
        with torch.no_grad():
            return tower(rows.nan_to_num(), image_sizes=torch.as_tensor(sizes), **asked)

    return run


def test_the_padding_contract_holds():
    layouts = [
        [(8, 16), (16, 8)],  # all rows of the largest budget
        [(1, 2)],
        [(1, 1)],
        SIZES,
        [(4, 16)],  # exactly the smallest budget
        [(2, 3)] * 8,  # no item of padding
        [(2, 16), (5, 13)],
    ]
    check_padding_contract(
        SHARED, original(TOWER), lambda layout, seed: pictures([(h // 4, w // 4) for h, w in layout], seed),
        "image_sizes", [pixels(sizes).tolist() for sizes in layouts], 1e-5,
    )  # fmt: skip


sizes_of_images = st.integers(1, 16).flatmap(
    lambda height: st.tuples(st.just(height), st.integers(1, min(16, 128 // height)))
)


@settings(max_examples=20)
@given(st.lists(sizes_of_images, min_size=1, max_size=10), st.integers(0, 3), st.integers(0, 3))
def test_any_call_equals_the_original_however_it_is_padded_and_split(sizes, down, right):
    height, width = map(max, zip(*sizes, strict=True))
    rows = pictures(sizes, padded=(height + down, width + right))
    expected = original(TOWER, output_hidden_states=True)(rows, pixels(sizes))
    output = SHARED(rows, image_sizes=pixels(sizes), output_hidden_states=True)
    assert distance(output, expected) < 1e-5
    assert distance(SHARED.eager(rows, pixels(sizes), output_hidden_states=True), expected) < 1e-5


def test_the_call_and_the_output_are_the_towers_own():
    encoder, rows, sizes = SHARED, pictures(SIZES), pixels(SIZES)
    expected = original(TOWER)(rows, sizes)
    for output in (
        encoder(rows, sizes),
        encoder(pixel_values=rows, image_sizes=sizes.tolist(), return_dict=True),
        encoder(rows.double(), image_sizes=[*sizes]),
        encoder(rows.transpose(2, 3).contiguous().transpose(2, 3), image_sizes=sizes.numpy()),
    ):
        assert type(output) is type(expected)
        assert output.last_hidden_state.shape == (1, 67, 32)
        assert distance(output, expected) < 1e-5
    whole = rows.nan_to_num()
    assert distance(encoder(whole), original(TOWER)(whole, [whole.shape[2:]] * 3)) < 1e-5  # all pixels are real
    assert not encoder.stats.eager


def test_the_padding_of_pictures_is_not_computed():
    rows, padding = SHARED.stats.rows, SHARED.stats.padding
    SHARED(pictures([(3, 5), (2, 2)], padded=(64, 64)), pixels([(3, 5), (2, 2)]))
    assert (SHARED.stats.rows - rows, SHARED.stats.padding - padding) == (19, 64 - 19)


def test_pixels_that_fill_no_patch_are_left_out():
    rows = torch.randn(2, 3, 15, 22)
    sizes = torch.tensor([[15, 22], [9, 7]])
    assert distance(SHARED(rows, sizes), original(TOWER)(rows, sizes)) < 1e-5


def test_verify_and_the_proof_compare_with_the_module_itself():
    verified = SHARED.verify([{"pixel_values": pictures(SIZES), "image_sizes": pixels(SIZES)}])
    assert "largest error" in str(verified)
    assert "verified against the module itself" in str(SHARED.report())


def test_attentions_come_from_the_original():
    tower = pixtral_tower()
    tower.set_attn_implementation("eager")
    encoder = vg.recipes.pixtral(tower, ONE, backend="tape", verify=UNVERIFIED)
    rows, sizes = pictures(SIZES).nan_to_num(), pixels(SIZES)
    assert len(encoder(rows, sizes, output_attentions=True).attentions) == 3
    assert encoder.stats.eager == {"output_attentions=True": 1}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows": pictures(SIZES)[0]}, vg.errors.InputError, r"expected \[images, 3, height, width\] with sides of at least 4, pictures"),
        ({"rows": pictures(SIZES)[:, :1]}, vg.errors.InputError, r"is \[3, 1, 32, 24\]: expected \[images, 3, height"),
        ({"sizes": pixels(SIZES)[:2]}, vg.errors.LayoutError, "image_sizes describes 2 images, but pixel_values has 3"),
        ({"sizes": pixels([(3, 5), (2, 2), (9, 6)])}, vg.errors.LayoutError, r"image_sizes\[2\] describes 9 x 6 patches of 4 pixels"),
        ({"sizes": [[12, 20], [-1, 8], [32, 24]]}, vg.errors.LayoutError, r"image_sizes\[1\] is \[-1, 8\]"),
        ({"sizes": [12, 20, 8]}, vg.errors.LayoutError, r"image_sizes\[0\] is 12: expected two integers \(height, width\)"),
        ({"sizes": pixels(SIZES).float()}, vg.errors.LayoutError, "image_sizes is a torch.float32 tensor"),
    ],
)  # fmt: skip
def test_wrong_input_gets_named_errors(change, error, message):
    arguments = {"rows": pictures(SIZES), "sizes": pixels(SIZES)} | change
    with pytest.raises(error, match=message):
        SHARED(*arguments.values())


# Whole models

VISION = TINY | {"model_type": "pixtral"}
WHOLE = {
    "mistral3": ("Mistral3Config", "Mistral3ForConditionalGeneration", WORDS | {"model_type": "mistral"}, {}),
    "lighton_ocr": ("LightOnOcrConfig", "LightOnOcrForConditionalGeneration", WORDS | {"model_type": "qwen3"}, {}),
    "llava": (
        "LlavaConfig", "LlavaForConditionalGeneration", WORDS | {"model_type": "mistral"},
        {"vision_feature_select_strategy": "full", "vision_feature_layer": -2, "image_seq_length": 1},
    ),
}  # fmt: skip
"""Configuration and model class of models with the tower, their texts, and what else they need."""


@pytest.mark.parametrize("package", WHOLE)
def test_whole_models_replay_and_equal_eager(package):
    config, name, words, more = WHOLE[package]
    tokens = {"image_token_id": IMAGE, "image_token_index": IMAGE}
    model = build(
        package, config, name, vision_config=VISION, text_config=words, spatial_merge_size=2, **tokens, **more
    )
    sizes = [(4, 6), (8, 8), (2, 12)]
    rows, image_sizes = pictures(sizes).nan_to_num(), pixels(sizes)
    merged = sum(h * w for h, w in sizes) // (1 if package == "llava" else 4)
    ids = torch.tensor([[1, 5, *[IMAGE] * merged, 7, 8]])
    call = {"input_ids": ids, "pixel_values": rows, "image_sizes": image_sizes}
    with torch.no_grad():
        features = model.get_image_features(rows, image_sizes=image_sizes)
        expected = model(**call).logits
        vg.wrap(model, ONE, backend="tape", verify=UNVERIFIED)
        got = model.get_image_features(rows, image_sizes=image_sizes)
        logits = model(**call).logits
    assert distance(got, features) < 1e-4
    assert distance(logits, expected) < 1e-4
    ((path, encoder),) = vg.encoders(model).items()
    assert vg.encoders(model).how == {path: "pixtral"}
    assert encoder.stats.replays.total() == 2
    assert not encoder.stats.eager


class TestContract(RecipeContract):
    recipe, budgets, argument = staticmethod(vg.recipes.pixtral), ONE, "image_sizes"
    tower, original = staticmethod(pixtral_tower), staticmethod(original)
    adapted = (
        "patch_conv", "transformer.layers.0.attention.q_proj", "transformer.layers.1.feed_forward.down_proj",
        "transformer.layers.2.ffn_norm",
    )  # fmt: skip
    hooked = "transformer.layers.1"

    def example(self):
        return pictures(SIZES), pixels(SIZES)
