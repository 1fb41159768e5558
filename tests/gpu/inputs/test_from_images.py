"""Decoded images to features on a GPU: bytes are normalised, and cut, inside the graph."""

import numpy as np
import pytest
import torch

import varlen_graphs as vg
from tests.support.gpu import on_gpus, tower_on_gpu
from tests.support.pictures import TINY, build
from tests.support.processors import (
    asks_for_more,
    decoded_images,
    patch_processor,
    photographs,
    processor_of,
    tensor_processor,
)  # fmt: skip
from tests.support.towers import distance

pytestmark = on_gpus()


def qwen3_vl():
    processor = processor_of("Qwen2VLImageProcessor")(patch_size=4, min_pixels=64, max_pixels=65536)
    encoder = vg.recipes.qwen3_vl(tower := tower_on_gpu(dtype=torch.float32), normalize=vg.inputs.Patches.of(processor))
    return encoder, tower, processor, {"pixel_values": "hidden_states", "image_grid_thw": "grid_thw"}


def siglip():
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    tower = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**sizes, image_size=32, patch_size=8))
    processor = processor_of("SiglipImageProcessor")(size={"height": 32, "width": 32})
    tower = tower.eval().to("cuda")
    return vg.recipes.by_batch(tower, normalize=vg.inputs.Normalize.of(processor)), tower, processor, {}


def pixtral():
    tower = build("pixtral", "PixtralVisionConfig", "PixtralVisionModel", **TINY).to("cuda")
    processor = processor_of("PixtralImageProcessor")(size={"longest_edge": 64}, patch_size={"height": 4, "width": 4})
    return vg.recipes.pixtral(tower, normalize=vg.inputs.Normalize.of(processor)), tower, processor, {}


@pytest.mark.parametrize("make", [qwen3_vl, siglip, pixtral])
def test_decoded_images_give_the_features_of_processor_and_tower(make):
    encoder, tower, processor, names = make()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # towers convolve
        for images in (photographs(), photographs()[1:]):
            made = processor(images, return_tensors="pt")
            with torch.no_grad():
                expected = tower(**{names.get(name, name): value.cuda() for name, value in made.items()})
            for _ in range(2):
                assert distance(encoder.from_images(images), expected) < 1e-5
                encoder.poison()
    assert encoder.stats.replays.total() == 4
    assert not encoder.stats.eager


def swaps_channels(self, image, do_convert_rgb=None, **options):
    return type(self).__bases__[0].process_image(self, image, do_convert_rgb=do_convert_rgb, **options)[::-1]


@pytest.mark.parametrize(
    "processor",
    [
        patch_processor(),
        tensor_processor(),
        patch_processor(patch_size=16, min_pixels=65536, max_pixels=2**24),
        type("More", (type(patch_processor()),), {"resize": asks_for_more})(patch_size=4, min_pixels=64),
        type("Swaps", (type(patch_processor()),), {"process_image": swaps_channels})(patch_size=4, min_pixels=64),
    ],
)
def test_images_are_resized_on_the_gpu_bit_for_bit_as_on_the_host(processor):
    resizing = vg.inputs.Patches.of(processor).resizing
    found = 0
    images = decoded_images()
    for image in [*images, *(torch.tensor(np.array(image)).cuda() for image in images[3:8])]:
        made = resizing(image, torch.device("cuda", 0))
        assert torch.equal(made.cpu(), resizing(image))
        found += made.is_cuda
    assert found == (0 if type(processor).__name__ in ("More", "Swaps") else 15)
