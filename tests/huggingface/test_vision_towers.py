"""Vision towers of whole models that take batches: Step 3.7, Unlimited-OCR, Phi-4-multimodal, Idefics, SAM."""

import functools
import inspect

import pytest
import torch
import transformers

import varlen_graphs as vg
from benchmarks.coverage import tiny
from tests.support.multimodal import SEGMENTING, random
from tests.support.towers import distance

SIDE = 56
"""Side of the images of Phi-4-multimodal, with patches of 14."""


@functools.cache
def whole_model(name):
    """Return a model, for tests that leave it as it was."""
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    return tiny.make(name)


@pytest.fixture
def wrapped():
    """Wrap a model until the test ends."""
    models = []

    def wrap(model, budgets=(1, 4)):
        models.append(vg.wrap(model, budgets, backend="tape"))
        return model

    yield wrap
    for model in models:
        vg.unwrap(model)


def test_step_reads_back_the_grid_that_it_has_made_of_sizes(wrapped):
    model = whole_model("Step3p7ForConditionalGeneration")
    calls = [
        {
            "pixel_values": random(2, 3, 112, 112, seed=seed),
            "pixel_values_local": random(3, 3, 56, 84, seed=seed),
            "num_local_patches": [2, 1],
        }
        for seed in (0, 1)
    ]
    with torch.no_grad():
        expected = [model.model.get_image_features(**call) for call in calls]
        wrapped(model, [3])
        for call, one in zip(calls, expected, strict=True):
            assert distance(model.model.get_image_features(**call), one) < 1e-5
    found = vg.encoders(model)
    assert found.how == {"model.vision_model": "by_batch"}
    encoder = found["model.vision_model"]
    assert encoder.stats.replays.total() == 4  # whole images, and crops of another size
    assert not encoder.stats.eager
    encoder.verify([{"pixel_values": calls[0]["pixel_values"]}])


def test_unlimited_ocr_replays_graphs_of_whole_pages_and_their_parts(wrapped):
    model, x, parts = (
        whole_model("UnlimitedOcrForConditionalGeneration"),
        random(2, 3, 256, 256),
        random(3, 3, 128, 128),
    )
    call = {"pixel_values_local": parts, "num_local_patches": [2, 1], "patches_grid": [[2, 1], [1, 1]]}
    expected = model.model.get_image_features(x, **call)
    wrapped(model, [3])
    assert distance(model.model.get_image_features(x, **call), expected) < 1e-5
    (encoder,) = vg.encoders(model).values()
    assert encoder.spec.layout.usual == (3, 256, 256)
    assert encoder.stats.replays.total() == 2
    assert not encoder.stats.eager


def phi(attention):
    """Return the part of Phi-4-multimodal that sees images."""
    if transformers.__version__.startswith("4."):
        pytest.skip("the default configuration of Phi-4-multimodal has no towers in transformers 4")
    part = whole_model("Phi4MultimodalForCausalLM").model.embed_tokens_extend.image_embed
    if "position_ids[patch_attention_mask" in inspect.getsource(type(part.img_processor.embeddings)):
        pytest.skip("Phi-4-multimodal of this transformers indexes by a mask, which no graph can")
    part.img_processor.config._attn_implementation = attention
    return part


def masks(*sizes):
    """Masks of images whose first so many lines and columns of patches are real."""
    places = torch.arange(SIDE // 14)
    return torch.stack([(places < h)[:, None] & (places < w) for h, w in sizes])


@pytest.mark.parametrize("sizes", [[(4, 4)] * 5, [(4, 4), (2, 4), (1, 3), (4, 1), (3, 3)]])
def test_phi_replays_graphs_with_masks_of_patches(sizes, wrapped):
    part, calls = phi("eager"), [(random(5, 3, SIDE, SIDE), masks(*sizes))]
    calls.append((random(3, 3, SIDE, SIDE, seed=1), masks(*sizes[2:])))
    with torch.no_grad():
        expected = [part.get_img_features(*call) for call in calls]
        wrapped(part)
        encoder = vg.encoders(part)["img_processor"]
        encoder.capture()
        for call, one in zip(calls, expected, strict=True):
            encoder.poison()
            assert distance(part.get_img_features(*call), one) < 1e-5
    assert encoder.stats.replays.total() == 3
    assert not encoder.stats.eager


def test_a_mask_of_another_size_and_none_at_all():
    tower, x = phi("eager").img_processor, random(2, 3, SIDE, SIDE)
    expected = tower(x, output_hidden_states=True)
    encoder = vg.recipes.by_batch(tower, [2], backend="tape")
    output = encoder(x, output_hidden_states=True)
    assert len(output.hidden_states) == len(expected.hidden_states) == 4
    assert distance(output, expected) < 1e-5
    with pytest.raises(vg.errors.InputError, match=r"patch_attention_mask is \[2, 3, 4\]: expected \[items, 4, 4\]"):
        encoder(x, patch_attention_mask=torch.ones(2, 3, 4, dtype=torch.bool))
    with pytest.raises(vg.errors.InputError, match="pixel_values"):
        encoder(random(2, 3, 84, 84))  # for which the masks would be larger
    holes = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(0)) > 0.4
    assert distance(encoder(x, patch_attention_mask=holes), tower(x, patch_attention_mask=holes)) < 1e-5
    assert not encoder.stats.eager


def test_attention_that_is_causal_without_a_mask_is_refused_with_the_reason(wrapped):
    """For SDPA, transformers passes no mask where all patches of a call are real."""
    with pytest.raises(
        vg.errors.SpecError, match=r"(?s)its attention is causal without one; .*_attn_implementation = 'eager'"
    ):
        wrapped(phi("sdpa"))


def test_models_with_prompts_replay_graphs_of_their_encoder_of_images(wrapped):
    config = transformers.SamConfig(
        vision_config={**SEGMENTING, "num_pos_feats": 8},
        prompt_encoder_config={"hidden_size": 16, "image_size": 16, "patch_size": 4},
        mask_decoder_config={"hidden_size": 16, "mlp_dim": 16, "num_attention_heads": 2, "iou_head_hidden_dim": 16},
    )
    torch.manual_seed(0)
    model = wrapped(transformers.SamModel(config).eval())
    pixels = random(2, 3, 16, 16)
    call = {"pixel_values": pixels, "input_points": torch.tensor([[[[9.0, 3.0]]], [[[4.0, 5.0]]]])}
    with torch.no_grad():
        masks, embeddings = model(**call).pred_masks, model.get_image_embeddings(pixels)
    encoders = vg.encoders(model)
    assert [*encoders] == ["vision_encoder"]
    assert encoders["vision_encoder"].stats.replays.total() == 2
    vg.unwrap(model)
    with torch.no_grad():
        assert distance(masks, model(**call).pred_masks) < 1e-5
        assert distance(embeddings, model.get_image_embeddings(pixels)) < 1e-5


def test_layers_may_be_deeper_inside_a_tower_that_is_no_model(wrapped):
    model = whole_model("IdeficsForVisionText2Text")
    tower = model.model.vision_model
    side = tower.config.image_size
    x = random(3, 3, side, side)
    expected = tower(pixel_values=x)
    wrapped(model)
    assert vg.encoders(model).how == {"model.vision_model": "by_batch"}
    assert distance(tower(pixel_values=x), expected) < 1e-5
    assert not vg.encoders(model)["model.vision_model"].stats.eager
