"""Inputs of the demo: photographs of scikit-image, preprocessed by the processors of transformers."""

from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TEMPORAL_PATCH = 2

SIZES: dict[str, Any] = {
    "patch_size": 16, "merge_size": 2, "temporal_patch_size": TEMPORAL_PATCH,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 2048 * 2048},
}  # fmt: skip
"""Options of both processors."""

PHOTOGRAPHS = {"astronaut": [(224, 224)], "chelsea": [(320, 224)], "coffee": [(448, 448)], "rocket": [(672, 448)]}
"""Photographs and their sizes, `(width, height)`."""

LARGE_PHOTOGRAPHS = {"retina": [(896, 896), (1344, 1344)]}
"""Further photographs for a GPU."""

CLIP = ("rocket", 8, (224, 224))
"""The clip: photograph, frames, and size of the window that pans over it."""


@dataclass(frozen=True)
class Sample:
    """One call of the tower."""

    name: str  # for the table
    pixel_values: Tensor  # float32 [rows, 3 * 2 * 16 * 16], as the processor returns it
    grid_thw: Tensor  # int64 [items, 3]


def join(name: str, samples: list[Sample]) -> Sample:
    """Concatenate samples into one call."""
    pixel_values = torch.cat([sample.pixel_values for sample in samples])
    return Sample(name, pixel_values, torch.cat([sample.grid_thw for sample in samples]))


def make_samples(large: bool) -> tuple[list[Sample], str]:
    """Return photographs, a clip, a batch and a mix of both as samples, and the names of the processors."""
    image_processor = _image_processor()
    photographs = {**PHOTOGRAPHS, **(LARGE_PHOTOGRAPHS if large else {})}
    images = [
        _encode_image(image_processor, f"{name} {size[0]}x{size[1]}", _photograph(name).resize(size))
        for name, sizes in photographs.items()
        for size in sizes
    ]
    clip, video_processor = _encode_clip(image_processor)
    batch = join("4 photographs", images[:4])
    mixed = join("photograph + clip", [images[0], clip])
    return [*images, clip, batch, mixed], f"{type(image_processor).__name__} and {video_processor}"


def save_samples(samples: list[Sample], path: Path) -> None:
    """Write samples to a file that machines without the processors can read."""
    torch.save([asdict(sample) for sample in samples], path)


def load_samples(path: Path) -> list[Sample]:
    """Read samples from a file written by `save_samples`."""
    return [Sample(**sample) for sample in torch.load(path, weights_only=True)]


def _photograph(name: str) -> Any:
    import skimage.data
    from PIL import Image

    return Image.fromarray(getattr(skimage.data, name)()).convert("RGB")


def _image_processor() -> Any:
    import transformers

    # The PIL processor, by its name in transformers 5 and in 4.57.
    name = "Qwen2VLImageProcessorPil" if hasattr(transformers, "Qwen2VLImageProcessorPil") else "Qwen2VLImageProcessor"
    return getattr(transformers, name)(image_mean=[0.5] * 3, image_std=[0.5] * 3, **SIZES)


def _encode_image(processor: Any, name: str, image: Any) -> Sample:
    encoded = processor(images=[image], return_tensors="pt")
    return Sample(name, encoded["pixel_values"], encoded["image_grid_thw"])


def _encode_clip(image_processor: Any) -> tuple[Sample, str]:
    name, count, size = CLIP
    photograph = _photograph(name)
    step = (photograph.width - size[0]) // (count - 1)
    frames = [photograph.crop((i * step, 60, i * step + size[0], 60 + size[1])) for i in range(count)]
    title = f"clip, {count} frames {size[0]}x{size[1]}"
    processor = _video_processor()
    if processor is None:
        stills = [_encode_image(image_processor, "frame", frame) for frame in frames]
        return _stack_frames(title, stills), "frames stacked from images (torchvision cannot be imported)"
    encoded = processor(
        videos=[torch.stack([_as_tensor(frame) for frame in frames])], do_sample_frames=False, return_tensors="pt"
    )
    return Sample(title, encoded["pixel_values_videos"], encoded["video_grid_thw"]), type(processor).__name__


def _video_processor() -> Any:
    try:
        import_module("torchvision")  # may be installed, but fail to load with this build of torch
        from transformers import Qwen3VLVideoProcessor
    except (ImportError, RuntimeError):
        return None
    return Qwen3VLVideoProcessor(**SIZES)


def _as_tensor(image: Any) -> Tensor:
    import numpy

    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)


def _stack_frames(name: str, stills: list[Sample]) -> Sample:
    """Stack images into a video. A still repeats itself in all temporal slots of a patch, so only its first is used."""
    slots = [still.pixel_values.unflatten(1, (3, TEMPORAL_PATCH, -1))[:, :, 0] for still in stills]
    patches = [torch.stack(slots[i : i + TEMPORAL_PATCH], dim=2) for i in range(0, len(slots), TEMPORAL_PATCH)]
    _, h, w = stills[0].grid_thw[0].tolist()
    return Sample(name, torch.cat(patches).flatten(1), torch.tensor([[len(patches), h, w]], device="cpu"))
