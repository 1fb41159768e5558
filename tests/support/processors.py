"""Image processors and photographs."""

import numpy as np
import torch
import transformers
from PIL import Image
from skimage import data


def processor_of(name):
    """The image processor of transformers that works with PIL."""
    return getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)


def photographs():
    return [Image.fromarray(data.astronaut()[:300, :200]), Image.fromarray(data.coffee()[:97, :201])]


def patch_processor(**options):
    """A processor of Qwen2-VL for small patches."""
    sizes = {"patch_size": 4, "min_pixels": 64, "max_pixels": 65536} | options
    return processor_of("Qwen2VLImageProcessor")(**sizes)


def tensor_processor():
    """A processor like Qwen2-VL's that works with torchvision, which resizes bytes on a CPU by this function of torch."""

    class OfTensors(type(patch_processor())):
        def process_image(self, image, do_convert_rgb=None, **options):
            decoded = super().process_image(image, do_convert_rgb=do_convert_rgb, **options)
            return torch.from_numpy(decoded.copy())

        def resize(self, image, size, resample, **factors):
            like = np.broadcast_to(np.uint8(0), image.shape)
            size = super().resize(like, size, resample, **factors).shape[1:]
            return torch.nn.functional.interpolate(image[None], size, mode="bicubic", antialias=True)[0]

        def rescale(self, image, *args):
            return super().rescale(np.asarray(image), *args)

    return OfTensors(patch_size=4, min_pixels=64, max_pixels=65536)


def decoded_images():
    """Pictures of all kinds, some of which grow, and some of which shrink by much."""
    astronaut, coffee, cat = data.astronaut(), data.coffee(), data.cat()
    frozen = cat[5:90, 7:61].copy()
    frozen.flags.writeable = False
    return [
        Image.fromarray(astronaut), Image.fromarray(coffee).convert("L"), Image.fromarray(cat).convert("RGBA"), coffee,
        torch.from_numpy(coffee[:9, :17]).permute(2, 0, 1), torch.from_numpy(cat), cat[::-1, ::2], frozen,
        coffee.transpose(2, 0, 1), coffee[:8, :16],
    ]  # fmt: skip


def asks_for_more(self, image, size, resample, **factors):
    """A `resize` that changes what Pillow makes."""
    return np.maximum(type(self).__bases__[0].resize(self, image, size, resample, **factors), 1)


def in_other_steps(self, image, size, resample, **factors):
    """A `resize` in two steps."""
    image = type(self).__bases__[0].resize(self, image[:, ::2, ::2], size, resample, **factors)
    return type(self).__bases__[0].resize(self, image, size, resample, **factors)
