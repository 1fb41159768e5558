"""`inputs.Normalize`: bytes come in, and are normalised inside the graph."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import varlen_graphs as vg
from tests.support.encoders import UNVERIFIED
from tests.support.pictures import TINY, build
from tests.support.processors import photographs, processor_of
from tests.support.towers import distance, glm4v_tower, qwen2_tower, qwen3_vl_tower

MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)


@given(
    st.integers(1, 4).flatmap(
        lambda c: st.lists(st.tuples(st.floats(-1, 1), st.floats(0.1, 2)), min_size=c, max_size=c)
    ),
    st.integers(1, 5),
    st.integers(0, 6),
)
def test_every_channel_has_its_own_mean_and_deviation(channels, values, rows):
    mean, std = zip(*channels, strict=True)
    pixels = torch.randint(0, 256, (rows, len(mean) * values), dtype=torch.uint8)
    got = vg.inputs.Normalize(mean, std)(pixels, torch.float64)
    expected = pixels.double().view(rows, len(mean), values) / 255 - torch.tensor(mean).double()[:, None]
    torch.testing.assert_close(got, (expected / torch.tensor(std).double()[:, None]).flatten(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["tape", "eager"])
def test_each_row_of_a_padded_batch_is_normalised_by_its_channels(backend):
    normalize, length = vg.inputs.Normalize(MEAN, STD), 6  # which three channels divide
    spec = vg.BufferSpec(
        rows=vg.inputs.Rows("x", shape=(6,), dtype=torch.uint8, normalize=normalize),
        layout=vg.Lengths("lengths", padded=True),
    )
    encoder = vg.GraphedEncoder(
        torch.nn.Identity(), [vg.budgets.Budget.padded(2, length)], spec, forward=lambda m, x: m(x), backend=backend
    )
    pixels = torch.randint(0, 256, (2, length, 6), dtype=torch.uint8)
    expected = normalize(pixels.flatten(0, 1), torch.float32).view(2, length, 6)
    torch.testing.assert_close(encoder(pixels, lengths=[length, length]), expected)


def test_the_constants_have_an_owner_that_the_guard_names(recwarn):
    normalize = vg.inputs.Normalize(MEAN, STD)
    spec = vg.BufferSpec(vg.inputs.Rows("input", (6,), torch.uint8, normalize=normalize), vg.Lengths("lengths"))
    encoder = vg.GraphedEncoder(torch.nn.Linear(6, 6).requires_grad_(False).eval(), [64], spec, backend="tape")
    pixels = torch.ones(6, 6, dtype=torch.uint8)
    encoder(pixels, lengths=[6])
    assert not recwarn  # of memory without an owner
    normalize.constants.on(pixels.device).untyped_storage().resize_(0)
    with pytest.raises(vg.errors.StaleGraphError, match=r"normalize.* was freed"):
        encoder(pixels, lengths=[6])


def test_the_default_dtype_of_the_caller_rounds_no_means():
    pixels = torch.randint(0, 256, (4, 6), dtype=torch.uint8)
    expected = vg.inputs.Normalize(MEAN, STD)(pixels, torch.float32)
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = vg.inputs.Normalize(MEAN, STD)(pixels, torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got, expected)


def test_a_tower_takes_the_bytes_of_a_processor():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=4096, image_mean=MEAN, image_std=STD)
    noise = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    images = [Image.fromarray(noise), Image.fromarray(noise[:24, :30])]
    floats = processor(images, return_tensors="pt")
    raw = processor(images, do_rescale=False, do_normalize=False, return_tensors="pt")
    grid, pixels = floats["image_grid_thw"], raw["pixel_values"].to(torch.uint8)

    tower = qwen3_vl_tower()
    with torch.no_grad():
        expected = tower(floats["pixel_values"], grid_thw=grid).pooler_output
    encoder = vg.recipes.qwen3_vl(tower, [512], backend="tape", normalize=vg.inputs.Normalize(MEAN, STD))
    for _ in range(2):
        assert distance(encoder(pixels, grid_thw=grid).pooler_output, expected) < 1e-5
        assert distance(encoder.eager(pixels, grid_thw=grid).pooler_output, expected) < 1e-5
        encoder.poison()
    with encoder.stage(grid) as stage:
        stage.rows.copy_(pixels)
    assert distance(stage.output.pooler_output, expected) < 1e-5


def test_a_hooked_tower_sees_normalised_pixels_too():
    tower, seen = qwen3_vl_tower(), []
    encoder = vg.recipes.qwen3_vl(
        tower, [64], backend="tape", verify=UNVERIFIED, normalize=vg.inputs.Normalize(MEAN, STD)
    )
    pixels = torch.randint(0, 256, (16, 96), dtype=torch.uint8)
    expected = encoder(pixels, grid_thw=[(1, 4, 4)]).pooler_output
    hook = tower.blocks[0].norm1.register_forward_hook(lambda module, args, output: seen.append(output))
    assert distance(encoder(pixels, grid_thw=[(1, 4, 4)]).pooler_output, expected) < 1e-5
    hook.remove()
    assert encoder.stats.eager["forward hooks"] == len(seen) == 1


def test_what_only_the_original_can_answer_it_answers_of_normalised_pixels():
    tower, normalize = qwen3_vl_tower(), vg.inputs.Normalize(MEAN, STD)
    encoder = vg.recipes.qwen3_vl(tower, [64], backend="tape", verify=UNVERIFIED, normalize=normalize)
    pixels, grid = torch.randint(0, 256, (16, 96), dtype=torch.uint8), torch.tensor([[1, 4, 4]])
    hook = tower.blocks[0].register_forward_hook(lambda module, args, output: output * 2)  # no recipe calls a block
    with torch.no_grad():
        expected = tower(normalize(pixels, torch.float32), grid_thw=grid).pooler_output
    assert distance(encoder(pixels, grid_thw=grid).pooler_output, expected) < 1e-5
    hook.remove()
    assert distance(encoder(pixels, grid_thw=grid).pooler_output, expected) > 1e-3
    assert len(encoder(pixels, grid_thw=grid, output_hidden_states=True).hidden_states) > 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: vg.inputs.Normalize((0.5,), (0.5, 0.5)), "as many means as deviations"),
        (lambda: vg.inputs.Normalize((0.5,), (0.0,)), "no deviation of 0"),
        (lambda: vg.inputs.Normalize((0.5,), (0.5,), 10**400), "one number as rescale"),
        (lambda: vg.inputs.Normalize((0.5,), (0.5,), "0.5"), "one number as rescale"),
        (lambda: vg.inputs.Normalize((0.5,), (float("nan"),)), "all finite"),
        (
            lambda: vg.inputs.Rows("x", (8,), torch.uint8, normalize=vg.inputs.Normalize(MEAN, STD)),
            "rows of shape (8,)",
        ),
        (
            lambda: vg.inputs.Rows("x", None, torch.uint8, normalize=vg.inputs.Normalize(MEAN, STD)),
            "rows of shape None",
        ),
        (
            lambda: vg.inputs.Rows("x", (9,), normalize=vg.inputs.Normalize(MEAN, STD)),
            "expected an integer dtype for rows",
        ),
    ],
)
def test_what_cannot_be_normalised_is_refused(make, message):
    with pytest.raises(vg.errors.SpecError, match=re.escape(message)):
        make()


def test_floats_are_refused_where_bytes_are_declared():
    encoder = vg.recipes.qwen3_vl(
        qwen3_vl_tower(), [64], backend="tape", verify=UNVERIFIED, normalize=vg.inputs.Normalize(MEAN, STD)
    )
    with pytest.raises(vg.errors.InputError, match=r"torch.float32.*torch.uint8"):
        encoder(torch.randn(16, 96), grid_thw=[(1, 4, 4)])


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "glm4v"])
def test_other_towers_take_bytes_too(family):
    tower = glm4v_tower() if family == "glm4v" else qwen2_tower(family=family)
    encoder = getattr(vg.recipes, family)(
        tower, [64], backend="tape", verify=UNVERIFIED, normalize=vg.inputs.Normalize(MEAN, STD)
    )
    pixels, grid = torch.randint(0, 256, (24, 96), dtype=torch.uint8), torch.tensor([[1, 4, 6]])
    with torch.no_grad():
        expected = tower(vg.inputs.Normalize(MEAN, STD)(pixels, torch.float32), grid_thw=grid)
    assert distance(features(encoder(pixels, grid_thw=grid)), features(expected)) < 1e-5


def features(output):
    return output if isinstance(output, torch.Tensor) else output.pooler_output


def check_from_images(encoder, tower, processor, argument):
    """The features of decoded images are those of the processor and the tower."""
    for images in (photographs(), photographs()[1:]):
        made = {**processor(images, return_tensors="pt")}
        with torch.no_grad():
            expected = tower(**made)
        for _ in range(2):
            assert distance(encoder.from_images(images), expected) < 1e-5
            encoder.poison()
        raw = processor(images, do_rescale=False, do_normalize=False, return_tensors="pt")
        assert distance(encoder.eager(**{**raw, argument: raw[argument].byte()}), expected) < 1e-5
    assert not encoder.stats.eager
    assert encoder.stats.replays.total() == 4


@pytest.mark.parametrize(
    ("processor", "model", "options"),
    [
        ("SiglipImageProcessor", "SiglipVision", {"size": {"height": 32, "width": 32}}),
        ("CLIPImageProcessor", "CLIPVision", {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}),
        ("ViTImageProcessor", "ViT", {"size": {"height": 32, "width": 32}}),
    ],
)
def test_images_of_one_size_are_normalised_in_graphs(processor, model, options):
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = getattr(transformers, f"{model}Config")(**sizes, image_size=32, patch_size=8)
    tower = getattr(transformers, f"{model}Model")(config).eval()
    own = processor_of(processor)(**options)
    encoder = vg.recipes.by_batch(
        tower, [1, 2], backend="tape", verify=UNVERIFIED, normalize=vg.inputs.Normalize.of(own)
    )
    check_from_images(encoder, tower, own, "pixel_values")
    for url in ("http://127.0.0.1:9/image.png", ["/etc/hostname"], b"\x89PNG"):
        with pytest.raises(vg.errors.InputError, match="expected a decoded one"):
            encoder.from_images(url)


def test_padded_pictures_are_normalised_in_graphs():
    tower = build("pixtral", "PixtralVisionConfig", "PixtralVisionModel", **TINY)
    own = processor_of("PixtralImageProcessor")(size={"longest_edge": 64}, patch_size={"height": 4, "width": 4})
    encoder = vg.recipes.pixtral(tower, [512], backend="tape", verify=UNVERIFIED, normalize=vg.inputs.Normalize.of(own))
    check_from_images(encoder, tower, own, "pixel_values")
    made = own(photographs(), do_rescale=False, do_normalize=False, return_tensors="pt")
    encoder.verify([{"pixel_values": made["pixel_values"].byte(), "image_sizes": made["image_sizes"]}])


class Made:
    """A processor that makes noise of images."""

    image_mean, image_std, rescale_factor, do_rescale, do_normalize = MEAN, STD, 1 / 255, True, True
    model_input_names = ("pixel_values",)

    def __init__(self, made):
        self.made = made

    def __call__(self, images, **_):
        return self.made(len(images))


def refusal(processor, shape=(3, 32, 32)):
    """The message with which a processor is refused."""
    with pytest.raises(vg.errors.SpecError) as refused:
        vg.BufferSpec(
            vg.inputs.Rows("pixel_values", shape, torch.uint8, normalize=vg.inputs.Normalize.of(processor)), vg.Batch()
        )
    return str(refused.value)


def fails(images):
    raise ValueError("too small")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda n: {"pixel_values": torch.full((n, 3, 8, 8), 0.5)}, "makes other 'pixel_values' when it does not"),
        (lambda n: {"pixels": torch.zeros(n, 3, 8, 8)}, "makes ['pixels'] when it does not rescale"),
        (lambda n: torch.zeros(n, 3, 8, 8), "makes Tensor when it does not rescale"),
        (lambda n: {"pixel_values": torch.full((n, 3, 8, 8), 7.0)}, "makes other values of images of [(37, 61)"),
        (fails, "refuses images of all sizes that were tried"),
    ],
)
def test_processors_that_make_something_else_are_refused(made, message):
    assert message in refusal(Made(made))


@pytest.mark.parametrize(
    ("processor", "options"),
    [
        ("SamImageProcessor", {"size": {"longest_edge": 64}, "pad_size": {"height": 64, "width": 64}}),
        ("YolosImageProcessor", {"size": {"shortest_edge": 32, "longest_edge": 64}}),
        ("DetrImageProcessor", {"size": {"shortest_edge": 32, "longest_edge": 64}}),
        ("ViltImageProcessor", {"size": {"shortest_edge": 64}}),
    ],
)
def test_processors_that_pad_after_they_normalise_are_refused(processor, options):
    assert "it may pad after it normalises" in refusal(processor_of(processor)(**options))


def test_a_processor_may_change_after_the_declaration():
    own = processor_of("ViTImageProcessor")(size={"height": 32, "width": 32})
    spec = vg.BufferSpec(
        vg.inputs.Rows("pixel_values", (3, 32, 32), torch.uint8, normalize=vg.inputs.Normalize.of(own)), vg.Batch()
    )
    encoder = vg.GraphedEncoder(torch.nn.Flatten().eval(), [2], spec, forward=flattened, backend="tape")
    expected = own(photographs(), return_tensors="pt")["pixel_values"].flatten(1)
    own.image_mean, own.size = [0.0] * 3, {"height": 16, "width": 16}
    torch.testing.assert_close(encoder.from_images(photographs()), expected)


def test_the_default_device_of_the_caller_does_not_matter():
    own = processor_of("ViTImageProcessor")(size={"height": 32, "width": 32})
    with torch.device("meta"):
        rows = vg.inputs.Rows("pixel_values", (3, 32, 32), torch.uint8, normalize=vg.inputs.Normalize.of(own))
        assert vg.BufferSpec(rows, vg.Batch())


def flattened(module, pixel_values):
    return module(pixel_values)


def test_frames_of_videos_keep_their_channels():
    normalize, frames = vg.inputs.Normalize(MEAN, STD), torch.randint(0, 256, (2, 6, 3, 8, 8), dtype=torch.uint8)
    spec = vg.BufferSpec(vg.inputs.Rows("pixel_values", (6, 3, 8, 8), torch.uint8, normalize=normalize), vg.Batch())
    encoder = vg.GraphedEncoder(torch.nn.Flatten().eval(), [2], spec, forward=flattened, backend="tape")
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    torch.testing.assert_close(encoder(frames), ((frames / 255 - mean) / std).flatten(1))
    with pytest.raises(vg.errors.SpecError, match=re.escape("expected pictures [..., 3, height, width]")):
        vg.inputs.Rows("pixel_values", (3, 4, 8, 8), torch.uint8, normalize=normalize)


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (type("Plain", (Made,), {"do_rescale": False})(dict), "Plain does not rescale and normalise"),
        (
            type("Videos", (Made,), {"model_input_names": ["pixel_values_videos"]})(dict),
            "Videos makes ['pixel_values_vi",
        ),
        (object(), "'object' object has no attribute 'do_rescale'; expected an image processor"),
    ],
)
def test_processors_that_do_not_normalise_are_refused(processor, message):
    with pytest.raises(vg.errors.SpecError, match=re.escape(message)):
        vg.inputs.Normalize.of(processor)


def test_the_factor_may_be_an_integer_of_any_size():
    pixels = torch.ones(2, 1)
    expected = vg.inputs.Normalize((0.0,), (2.0**70,), 2.0**70)(pixels, torch.float32)
    assert torch.equal(vg.inputs.Normalize((0.0,), (2.0**70,), 2**70)(pixels, torch.float32), expected)
