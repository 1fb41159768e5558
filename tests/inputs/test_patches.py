"""`inputs.Patches`: images come as bytes, and are cut into patches inside the graph."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import varlen_graphs as vg
from tests.support.encoders import UNVERIFIED
from tests.support.processors import processor_of
from tests.support.towers import distance, qwen2_tower, qwen3_vl_tower
from varlen_graphs.kernels.patches.op import patches

MEAN, STD = (0.48, 0.45, 0.40), (0.26, 0.27, 0.28)
PATCHES = vg.inputs.Patches(vg.inputs.Normalize(MEAN, STD), size=4)


def image_of(height, width, seed=0):
    return np.random.default_rng([seed, height, width]).integers(0, 256, (height, width, 3), dtype=np.uint8)


def rows_of(images):
    """View images `[height, width, channels]` as rows of bytes."""
    return torch.cat([torch.from_numpy(image).reshape(-1, 48) for image in images])


def processor(**options):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    sizes = {"patch_size": 4, "min_pixels": 64, "max_pixels": 65536}
    return Qwen2VLImageProcessorPil(**sizes, image_mean=MEAN, image_std=STD, **options)


sides = st.integers(1, 6).map(lambda n: 8 * n)


@settings(max_examples=20)
@given(st.lists(st.tuples(sides, sides), min_size=1, max_size=4), st.integers(0, 5))
def test_patches_are_those_of_the_processor_however_many_images_there_are(sizes, padding):
    images = [image_of(*size, seed) for seed, size in enumerate(sizes)]
    expected = processor()([Image.fromarray(image) for image in images], return_tensors="pt")
    grid = expected["image_grid_thw"]
    assert (grid[:, 1:] * 4).tolist() == [[*size] for size in sizes]  # so large that none is resized
    rows = torch.nn.functional.pad(rows_of(images), (0, 0, 0, padding), value=77)
    table = torch.cat([grid, torch.zeros(2, 3, dtype=torch.int64)])
    got = patches(table, rows, PATCHES.constants.on(rows.device), 4, 2, 2, torch.float32)
    assert got.shape == (len(rows), 96)
    torch.testing.assert_close(got[: len(got) - padding], expected["pixel_values"], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("make", [qwen3_vl_tower, qwen2_tower])
def test_a_tower_takes_images_as_bytes(make):
    tower = make()
    recipe = vg.recipes.qwen3_vl if make is qwen3_vl_tower else vg.recipes.qwen2_5_vl
    images = [image_of(40, 56), image_of(24, 32), image_of(8, 48)]
    floats = processor()([Image.fromarray(image) for image in images], return_tensors="pt")
    grid = floats["image_grid_thw"]
    with torch.no_grad():
        expected = tower(floats["pixel_values"], grid_thw=grid)
    budgets = [vg.budgets.Budget(256, segments=64), vg.budgets.Budget(512, segments=64)]
    encoder = recipe(tower, budgets, backend="tape", normalize=vg.inputs.Patches.of(processor()))
    rows = rows_of(images)
    assert rows.nbytes * 8 == floats["pixel_values"].nbytes
    for _ in range(2):
        assert distance(encoder(rows, grid_thw=grid), expected) < 1e-5
        assert distance(encoder.eager(rows, grid_thw=grid), expected) < 1e-5
        encoder.poison()
    with encoder.stage(grid) as stage:
        stage.rows.copy_(rows)
    assert distance(stage.output, expected) < 1e-5
    assert encoder.stats.replays.total() == 3
    encoder.verify([{"hidden_states": rows, "grid_thw": grid}])


def test_decoded_images_are_resized_as_the_processor_does():
    from skimage import data

    tower, own = qwen3_vl_tower(), processor()
    photographs = [data.astronaut()[:66, :44], data.coffee()[:25, :101], data.cat()[:26, :32]]
    floats = own([Image.fromarray(photograph) for photograph in photographs], return_tensors="pt")
    with torch.no_grad():
        expected = tower(floats["pixel_values"], grid_thw=floats["image_grid_thw"])
    encoder = vg.recipes.qwen3_vl(tower, [512], backend="tape", verify=UNVERIFIED, normalize=vg.inputs.Patches.of(own))
    first, second, third = photographs
    images = [Image.fromarray(first), second, torch.from_numpy(third).permute(2, 0, 1)]
    assert distance(encoder.from_images(images), expected) < 1e-5
    assert distance(encoder.from_images([images[:1], images[1:]]), expected) < 1e-5  # as the processor takes them
    alone = encoder.from_images(images[1:2])
    for image in (images[1], torch.from_numpy(second), Image.fromarray(second), second[None], iter(images[1:2])):
        assert distance(encoder.from_images(image), alone) < 1e-5
    assert encoder.stats.replays.total() == 8


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ("Siglip2ImageProcessor", "has no attribute 'merge_size'"),
        ("PaddleOCRVLImageProcessor", "patches in another order"),
    ],
)
def test_processors_with_other_patches_are_refused(processor, message):
    own = processor_of(processor)(patch_size=4)
    spec = {"rows": vg.inputs.Rows("x", (48,), torch.uint8, normalize=vg.inputs.Patches.of(own))}
    with pytest.raises(vg.errors.SpecError, match=re.escape(message)):
        vg.BufferSpec(**spec, layout=vg.GridTHW("grid_thw", merge=2))


def test_the_default_device_of_the_caller_does_not_matter():
    with torch.device("meta"):
        rows = vg.inputs.Rows("x", (48,), torch.uint8, normalize=vg.inputs.Patches.of(processor()))
        assert vg.BufferSpec(rows, vg.GridTHW("grid_thw", merge=2))


def test_a_processor_that_merges_other_patches_than_the_tower_is_refused():
    patches = vg.inputs.Patches.of(processor(merge_size=1))
    with pytest.raises(vg.errors.SpecError, match="patches in another order"):
        vg.recipes.qwen3_vl(qwen3_vl_tower(), [64], normalize=patches)


UNDECODED = [
    ("http://127.0.0.1:9/image.png", "str"), (["/etc/hostname"], "str"), (b"\x89PNG", "bytes"), (Path("image.png"), "PosixPath"),
    ([None], "NoneType"), ({"image": 1}, "dict"), ([[3]], "int"),
]  # fmt: skip
"""What a processor would open, fetch, or take apart."""


@pytest.mark.parametrize(
    ("patches", "images", "message"),
    [
        (PATCHES, [image_of(8, 8)], "has no image processor: expected normalize="),
        (None, [], "there are no images"),
        (None, [np.zeros((8, 8, 3), dtype=np.int64)], "makes torch.int64 [3, 8, 8] of an image: expected bytes"),
        (None, [image_of(8, 8)[..., 0]], "an image has 2 dimensions: expected 3"),
        (vg.inputs.Normalize(MEAN, STD), [image_of(8, 8)], "has no image processor: expected normalize="),
        *((None, one, f"got a {name} as an image: expected a decoded one") for one, name in UNDECODED),
    ],
)
def test_images_that_cannot_be_read_are_refused(patches, images, message):
    own = processor(do_resize=False)
    encoder = vg.recipes.qwen3_vl(
        qwen3_vl_tower(),
        [64],
        backend="tape",
        verify=UNVERIFIED,
        normalize=vg.inputs.Patches.of(own) if patches is None else patches,
    )
    with pytest.raises(vg.errors.InputError, match=re.escape(message)):
        encoder.from_images(images)


def test_calls_are_split_between_images():
    tower = qwen3_vl_tower()
    images = [image_of(40, 56, seed) for seed in range(4)]  # 140 patches each
    encoder = vg.recipes.qwen3_vl(tower, [192], backend="tape", verify=UNVERIFIED, normalize=PATCHES)
    grid = torch.tensor([[1, 10, 14]] * 4)
    whole = encoder(rows_of(images), grid_thw=grid).pooler_output
    alone = [encoder(rows_of([image]), grid_thw=grid[:1]).pooler_output for image in images]
    assert distance(whole, torch.cat(alone)) < 1e-6
    assert encoder.stats.replays.total() == 8


def test_a_hooked_tower_sees_patches_too():
    tower, seen = qwen3_vl_tower(), []
    encoder = vg.recipes.qwen3_vl(tower, [64], backend="tape", verify=UNVERIFIED, normalize=PATCHES)
    rows = rows_of([image_of(16, 16)])
    expected = encoder(rows, grid_thw=[(1, 4, 4)]).pooler_output
    tower.patch_embed.register_forward_hook(lambda module, args, output: seen.append(args[0].shape))
    assert distance(encoder(rows, grid_thw=[(1, 4, 4)]).pooler_output, expected) < 1e-5
    assert seen == [(16, 96)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: vg.inputs.Patches(vg.inputs.Normalize(MEAN, STD), size=0), "size=0"),
        (lambda: vg.inputs.Patches(MEAN, size=4), "expected"),
        (lambda: vg.inputs.Rows("x", (96,), torch.uint8, normalize=PATCHES), "expected shape=(48,)"),
        (lambda: vg.inputs.Rows("x", (48,), torch.float32, normalize=PATCHES), "expected an integer dtype"),
        (
            lambda: vg.BufferSpec(vg.inputs.Rows("x", (48,), torch.uint8, normalize=PATCHES), vg.Lengths()),
            "but Lengths describes none: expected GridTHW",
        ),
        (
            lambda: vg.recipes.qwen3_vl(qwen3_vl_tower(), normalize=vg.inputs.Patches(PATCHES.normalize, size=8)),
            "makes patches of 384 values, but the tower takes 96",
        ),
        (lambda: vg.inputs.Patches.of(object()), "has no attribute 'do_rescale'; expected an image processor"),
    ],
)
def test_declarations_that_cannot_be(make, message):
    with pytest.raises(vg.errors.SpecError, match=re.escape(message)):
        make()
