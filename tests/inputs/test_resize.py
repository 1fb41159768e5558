"""Images are resized on a device bit for bit as their processor resizes them on the host."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from skimage import data

import varlen_graphs as vg
from tests.support.encoders import UNVERIFIED
from tests.support.processors import asks_for_more, decoded_images, in_other_steps, patch_processor, tensor_processor
from tests.support.towers import qwen3_vl_tower
from varlen_graphs.inputs.resize import PILLOW_BITS, Resampling, cubic, triangle

FILTERS = {cubic: ("bicubic", Image.Resampling.BICUBIC), triangle: ("bilinear", Image.Resampling.BILINEAR)}

sides = st.one_of(st.integers(1, 40), st.integers(1, 300))


@settings(max_examples=60, deadline=None)
@given(st.tuples(sides, sides), st.tuples(sides, sides), st.sampled_from([*FILTERS]), st.integers(0, 9))
def test_bytes_are_those_of_pillow_and_of_torch(before, after, weights, seed):
    image = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (*before, 3), dtype=np.uint8))
    mode, of_pillow = FILTERS[weights]
    expected = np.asarray(Image.fromarray(image.numpy()).resize(after[::-1], of_pillow))
    made = {tuple(Resampling(weights, PILLOW_BITS, first).resize(image, *after).flatten().tolist()) for first in (0, 1)}
    assert tuple(expected.flatten().tolist()) in made  # which side comes first depends on the version of Pillow
    expected = torch.nn.functional.interpolate(image.permute(2, 0, 1)[None], after, mode=mode, antialias=True)[0]
    assert torch.equal(Resampling(weights, None, False).resize(image, *after), expected.permute(1, 2, 0))


def encoder_of(processor):
    patches = vg.inputs.Patches.of(processor)
    return vg.recipes.qwen3_vl(qwen3_vl_tower(), [512], backend="tape", verify=UNVERIFIED, normalize=patches)


@pytest.mark.parametrize(
    "processor", [patch_processor, tensor_processor, lambda: patch_processor(resample=Image.Resampling.BILINEAR)]
)
def test_images_have_the_same_bytes_wherever_they_are_resized(processor):
    encoder = encoder_of(processor())
    on_host, there = encoder.read_images(decoded_images()), encoder.read_images(decoded_images(), device="cpu")
    for name, value in on_host.items():
        assert torch.equal(value, there[name])


@pytest.mark.parametrize("resize", [asks_for_more, in_other_steps])
def test_processors_that_resize_in_another_way_do_so_on_the_host(resize):
    other = type("Other", (type(patch_processor()),), {"resize": resize})
    encoder = encoder_of(other(patch_size=4, min_pixels=64, max_pixels=65536))
    on_host, there = encoder.read_images(decoded_images()), encoder.read_images(decoded_images(), device="cpu")
    for name, value in on_host.items():
        assert torch.equal(value, there[name])


def test_processors_that_do_not_resize_leave_images_as_they_are():
    encoder, image = encoder_of(patch_processor(do_resize=False)), data.coffee()[:8, :16]
    rows = encoder.read_images(image, device="cpu")["hidden_states"]
    assert torch.equal(rows, torch.tensor(image).view(-1, 48))
    with pytest.raises(vg.errors.InputError, match=re.escape("sides that are multiples of 4")):
        encoder.read_images(data.coffee()[:9, :16], device="cpu")
    with pytest.raises(
        vg.errors.InputError, match=re.escape("makes torch.int64 [3, 8, 8] of an image: expected bytes")
    ):
        encoder.read_images(np.zeros((8, 8, 3), np.int64), device="cpu")


def test_what_the_processor_refuses_is_refused():
    encoder = encoder_of(patch_processor())
    for device in (None, "cpu"):
        with pytest.raises(ValueError, match="aspect ratio"):
            encoder.read_images(np.zeros((2, 800, 3), np.uint8), device=device)
