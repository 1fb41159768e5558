"""Image processors and photographs."""

import transformers
from PIL import Image
from skimage import data


def processor_of(name):
    """The image processor of transformers that works with PIL."""
    return getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)


def photographs():
    return [Image.fromarray(data.astronaut()[:300, :200]), Image.fromarray(data.coffee()[:97, :201])]
