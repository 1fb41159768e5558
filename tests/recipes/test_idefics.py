"""The vision towers of Idefics 2, Idefics 3 and SmolVLM: padded tiles with a mask, packed on their way in."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support.contract import check_padding_contract
from tests.support.encoders import UNVERIFIED
from tests.support.pictures import IMAGE, PATCH, TINY, WORDS, build, patch_mask, pictures
from tests.support.recipe_contract import RecipeContract
from tests.support.towers import distance

FAMILIES = {
    "idefics2": ("Idefics2VisionConfig", "Idefics2VisionTransformer"),
    "idefics3": ("Idefics3VisionConfig", "Idefics3VisionTransformer"),
    "smolvlm": ("SmolVLMVisionConfig", "SmolVLMVisionTransformer"),
}
BUDGETS = [vg.budgets.Budget(64, items=4), vg.budgets.Budget(128, items=8), vg.budgets.Budget(256, items=6)]
ONE = BUDGETS[1:2]
SIZES = [(3, 5), (2, 2), (8, 6)]
VISION = {name: value for name, value in TINY.items() if name != "head_dim"}


def idefics_tower(family="idefics2", **options):
    return build(family, *FAMILIES[family], **options, **VISION)


def original(tower, **asked):
    """Run the tower itself; where the mask is false, what it gives means nothing, and becomes zeros."""

    def run(rows, mask):
        with torch.no_grad():
            output = tower(rows.nan_to_num(), patch_attention_mask=mask, **asked)
        real = mask.flatten(1)[..., None]
        output.last_hidden_state = output.last_hidden_state * real
        if asked.get("output_hidden_states"):
            output.hidden_states = tuple(state * real for state in output.hidden_states)
        return output

    return run


TOWER = idefics_tower(seed=1)
SHARED = vg.recipes.idefics(TOWER, BUDGETS, backend="tape")


def test_the_padding_contract_holds():
    layouts = [
        [(8, 16), (16, 8)],  # all rows of the largest budget
        [(1, 2)],
        [(1, 1)],
        SIZES,
        [(4, 16)],  # exactly the smallest budget
        [(2, 3)] * 8,  # no item of padding
        [(2, 60), (5, 13)],  # larger than the table of positions
    ]

    def rows(mask, seed):
        return pictures([(int(own[:, 0].sum()), int(own[0].sum())) for own in mask], seed)

    masks = [patch_mask(sizes) for sizes in layouts]
    check_padding_contract(SHARED, original(TOWER), rows, "patch_attention_mask", masks, 1e-5)


sizes_of_tiles = st.integers(1, 40).flatmap(
    lambda height: st.tuples(st.just(height), st.integers(1, min(40, 128 // height)))
)


@settings(max_examples=20)
@given(st.lists(sizes_of_tiles, min_size=1, max_size=10), st.integers(0, 3), st.integers(0, 3))
def test_any_call_equals_the_original_however_it_is_padded_and_split(sizes, down, right):
    height, width = map(max, zip(*sizes, strict=True))
    padded = height + down, width + right
    rows, mask = pictures(sizes, padded=padded), patch_mask(sizes, padded)
    expected = original(TOWER, output_hidden_states=True)(rows, mask)
    assert distance(SHARED(rows, mask, output_hidden_states=True), expected) < 1e-5
    assert distance(SHARED.eager(rows, mask, output_hidden_states=True), expected) < 1e-5


def test_the_call_and_the_output_are_the_towers_own():
    encoder = SHARED
    rows, mask = pictures(SIZES), patch_mask(SIZES)
    expected = original(TOWER)(rows, mask)
    for output in (encoder(rows, mask), encoder(pixel_values=rows, patch_attention_mask=mask.int(), return_dict=True),
                   encoder(rows.double(), patch_attention_mask=[*mask]), encoder.eager(rows, mask)):  # fmt: skip
        assert output.last_hidden_state.shape == (3, 48, 32)
        assert distance(output, expected) < 1e-5
    whole = rows.nan_to_num()
    assert distance(encoder(whole), original(TOWER)(whole, torch.ones_like(mask))) < 1e-5  # all patches are real
    assert not encoder.stats.eager
    assert "verified against the module itself" in str(encoder.report())
    assert "largest error" in str(encoder.verify([{"pixel_values": whole, "patch_attention_mask": mask}]))


def test_padding_whose_features_become_tokens_runs_eager():
    tower = idefics_tower("idefics3")
    encoder = vg.recipes.idefics(tower, ONE, backend="tape")
    rows, mask = pictures([(5, 6), (5, 6)]), patch_mask([(5, 6), (5, 6)])
    expected = original(tower, output_hidden_states=True)(rows, mask)
    assert distance(encoder(rows, mask, output_hidden_states=True), expected) < 1e-5
    assert distance(encoder(rows), original(tower)(rows, mask)) < 1e-5
    assert not encoder.stats.eager
    assert "verified against the module itself" in str(encoder.report())
    rows, mask = pictures(SIZES).nan_to_num(), patch_mask(SIZES)
    with torch.no_grad():
        assert distance(encoder(rows, mask), tower(rows, patch_attention_mask=mask)) == 0
    assert encoder.stats.eager == {"padding in patch_attention_mask": 1}


def test_the_padding_of_tiles_is_not_computed():
    rows, padding = SHARED.stats.rows, SHARED.stats.padding
    SHARED(pictures([(3, 5), (2, 2)], padded=(64, 64)), patch_mask([(3, 5), (2, 2)], (64, 64)))
    assert (SHARED.stats.rows - rows, SHARED.stats.padding - padding) == (19, 64 - 19)


def test_positions_are_those_of_the_tower_for_every_size():
    """Also where several positions lie on the border of a bucket; 16 of them are in the table."""
    sizes = [(size, 1) for size in range(1, 120)]
    rows, mask = torch.zeros(119, 3, 119 * PATCH, PATCH), patch_mask(sizes)
    expected = TOWER.embeddings(pixel_values=rows, patch_attention_mask=mask)
    got = SHARED.eager(rows, mask, output_hidden_states=True).hidden_states[0]
    assert torch.equal(got, torch.where(mask.flatten(1)[..., None], expected, 0))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows": pictures(SIZES)[0]}, vg.errors.InputError, r"expected \[images, 3, height, width\] with sides of at least 4, pictures"),
        ({"mask": patch_mask(SIZES)[:2]}, vg.errors.LayoutError, "patch_attention_mask describes 2 images, but pixel_values has 3"),
        ({"mask": patch_mask(SIZES, (9, 6))}, vg.errors.LayoutError, r"is \[3, 9, 6\], but the pictures have 8 x 6 patches"),
        ({"mask": patch_mask(SIZES).flip(1)}, vg.errors.LayoutError, r"patch_attention_mask\[0\] marks other patches than"),
        ({"mask": patch_mask(SIZES).flip(2)}, vg.errors.LayoutError, r"patch_attention_mask\[0\] marks other patches than"),
        ({"mask": patch_mask(SIZES) * 2}, vg.errors.LayoutError, r"\[0\] marks other patches than those of a rectangle"),
        ({"mask": patch_mask(SIZES).flatten(1)}, vg.errors.LayoutError, r"is torch.bool \[3, 48\]: expected a tensor \[images, height"),
        ({"mask": patch_mask(SIZES).float()}, vg.errors.LayoutError, r"is torch.float32 \[3, 8, 6\]"),
        ({"mask": "all"}, vg.errors.LayoutError, "is a str: expected a tensor"),
        ({"rows": torch.zeros(1, 3, 4, 257 * 4), "mask": None}, vg.errors.LayoutError, "has a size of 257, but buffer 'buckets' has"),
    ],
)  # fmt: skip
def test_wrong_input_gets_named_errors(change, error, message):
    arguments = {"rows": pictures(SIZES), "mask": patch_mask(SIZES)} | change
    with pytest.raises(error, match=message):
        SHARED(*arguments.values())


def test_attentions_come_from_the_original():
    tower = idefics_tower()
    tower.set_attn_implementation("eager")
    encoder = vg.recipes.idefics(tower, ONE, backend="tape", verify=UNVERIFIED)
    rows, mask = pictures(SIZES).nan_to_num(), patch_mask(SIZES)
    encoder(rows, mask, output_attentions=True)
    assert encoder.stats.eager == {"output_attentions=True": 1}


# Whole models

PERCEIVER = {"resampler_n_latents": 3, "resampler_depth": 2, "resampler_n_heads": 2, "resampler_head_dim": 16,
             "num_key_value_heads": 1, "hidden_size": 32}  # fmt: skip
WHOLE = {
    "idefics2": ("Idefics2Config", "Idefics2ForConditionalGeneration", "mistral", {"perceiver_config": PERCEIVER}),
    "idefics3": ("Idefics3Config", "Idefics3ForConditionalGeneration", "llama", {"scale_factor": 2}),
    "smolvlm": ("SmolVLMConfig", "SmolVLMForConditionalGeneration", "llama", {"scale_factor": 2}),
}
"""Configuration and model class of the whole models, their texts, and what else they need."""


@pytest.mark.parametrize("package", WHOLE)
def test_whole_models_replay_and_equal_eager(package):
    """One image of the second text is padding as a whole; with Idefics 2 the other one is smaller than those before."""
    config, name, words, more = WHOLE[package]
    model = build(
        package, config, name, image_token_id=IMAGE, vision_config=VISION, **more,
        text_config=WORDS | {"model_type": words},
    )  # fmt: skip
    sizes = [(4, 4), (4, 4), (4, 2 if package == "idefics2" else 4), (4, 4)]
    tiles, mask = pictures(sizes).nan_to_num().unflatten(0, (2, 2)), patch_mask(sizes).unflatten(0, (2, 2))
    tiles[1, 1], mask[1, 1] = 0, False
    pixel_mask = mask.repeat_interleave(PATCH, -1).repeat_interleave(PATCH, -2)
    tokens = 3 if package == "idefics2" else 4
    ids = torch.tensor([[1, *[IMAGE] * 2 * tokens, 7], [1, *[IMAGE] * tokens, *[5] * tokens, 7]])
    call = {"input_ids": ids, "pixel_values": tiles, "pixel_attention_mask": pixel_mask}

    def run():
        with torch.no_grad():
            features = model.model.get_image_features(tiles, pixel_mask)
            return getattr(features, "pooler_output", features), model(**call).logits

    features, logits = run()
    vg.wrap(model, ONE, backend="tape", verify=UNVERIFIED)
    got, got_logits = run()
    assert distance(got_logits, logits) < 1e-4
    whole = [(one[:4], other[:4]) for one, other in zip(got, features, strict=True)]
    assert all(distance(one, other) < 1e-4 for one, other in whole)
    found = vg.encoders(model)
    assert found.how["model.vision_model"] == "idefics"
    assert found["model.vision_model"].stats.replays.total() == 2
    assert not found["model.vision_model"].stats.eager


class TestContract(RecipeContract):
    recipe, budgets, argument = staticmethod(vg.recipes.idefics), ONE, "patch_attention_mask"
    tower, original = staticmethod(idefics_tower), staticmethod(original)
    adapted = "embeddings.patch_embedding", "encoder.layers.0.self_attn.k_proj", "encoder.layers.1.mlp.fc1"
    hooked = "encoder.layers.1"

    def example(self):
        return pictures(SIZES), patch_mask(SIZES)
