"""Resizing of images as a processor of transformers does it: by itself on the host, or bit for bit so on a device."""

import copy
import math
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from varlen_graphs.kernels.resample.op import resample
from varlen_graphs.shadows.constants import NotCopied

Array = numpy.ndarray[Any, Any]

Weights = Callable[[Array], Array]
"""Weights of pixels by their distances from a position, float64."""

PILLOW_BITS, TORCH_MOST_BITS, TORCH_WEIGHT = 22, 22, 1 << 15
"""Binary places of Pillow's weights; the most of torch's, whose weights stay below a number."""


def triangle(distance: Array) -> Array:
    """Return the weights of bilinear resampling."""
    return numpy.clip(1 - abs(distance), 0, None)


def cubic(distance: Array) -> Array:
    """Return the weights of bicubic resampling with `a = -0.5`."""
    x, a = abs(distance), -0.5
    outer = (((x - 5) * x + 8) * x - 4) * a
    return numpy.where(x < 1, ((a + 2) * x - (a + 3)) * x * x + 1, numpy.where(x < 2, outer, 0))


SUPPORT: dict[Weights, float] = {cubic: 2.0, triangle: 1.0}
"""Distance from which on weights are 0."""


class Resampling(NamedTuple):
    """Resizes images of bytes as a library does.

    Attributes:
        weights: Weights of pixels by their distances.
        bits: Binary places of these weights; `None` for as many as 16 bits take, as torch and torchvision do.
        columns_first: True to resample columns first in images that lose more than twice as many rows as columns, as
            Pillow does since version 13.
    """

    weights: Weights
    bits: int | None
    columns_first: bool

    def resize(self, image: Tensor, height: int, width: int) -> Tensor:
        """Resize bytes `[height, width, channels]` on their device. A launch for each side that changes."""
        fewer_rows, fewer_columns = image.shape[0] - height, image.shape[1] - width
        columns_first = self.columns_first and fewer_rows > max(0, 2 * fewer_columns)
        for is_columns in (columns_first, not columns_first):
            rows, columns, channels = image.shape
            size, resized = (rows, height) if is_columns else (columns, width)
            if size != resized:
                filters, bits = filters_of(self.weights, self.bits, size, resized)
                pixels = image.view(1, rows, -1) if is_columns else image
                made = resample(pixels, torch.from_numpy(filters).to(image.device), bits)
                image = made.view(-1, columns, channels) if is_columns else made
        return image


RESAMPLINGS = [
    Resampling(weights, bits, columns_first)
    for weights in SUPPORT
    for bits, columns_first in ((PILLOW_BITS, True), (PILLOW_BITS, False), (None, False))
]
"""Those of Pillow, since version 13 and before, and of torch."""


@lru_cache(maxsize=256)
def filters_of(weights: Weights, bits: int | None, size: int, resized: int) -> tuple[Array, int]:
    """Return `filters` and `bits` of `resample`, computed in float64 in the order of operations of the libraries."""
    scale = size / resized
    stretch = max(scale, 1.0)
    support = SUPPORT[weights] * stretch
    centre = (numpy.arange(resized) + 0.5) * scale
    first = numpy.maximum((centre - support + 0.5).astype(numpy.int64), 0)
    end = numpy.minimum((centre + support + 0.5).astype(numpy.int64), size)
    entry = first[:, None] + numpy.arange(math.ceil(support) * 2 + 1)
    each = weights((entry - centre[:, None] + 0.5) * (1 / stretch)) * (entry < end[:, None])
    each /= numpy.add.accumulate(each, 1)[:, -1:]  # one after the other, as loops add them
    if bits is None:
        places = range(TORCH_MOST_BITS)
        bits = next((n for n in places if int(0.5 + each.max() * 2 ** (n + 1)) >= TORCH_WEIGHT), TORCH_MOST_BITS)
    scaled = each * 2**bits
    rounded = numpy.trunc(scaled + numpy.copysign(0.5, scaled))
    return numpy.column_stack([first, rounded]).astype(numpy.int32), bits


class Resizing(NotCopied):
    """Resizes images as a processor does that has the methods of Qwen2-VL's in transformers 5.23.

    The size of a result is always told by the processor. Its resampling on a device is found by trying those of the
    libraries on synthetic images, at the first image for that device.

    Args:
        processor: The processor.
        frames: Frames of a temporal patch.
    """

    def __init__(self, processor: Any, frames: int) -> None:
        self._processor = processor
        self._frames = frames
        self._found: dict[torch.device, Resampling | None] = {}

    def __call__(self, image: Any, device: torch.device | None = None) -> Tensor:
        """Resize an image, `[height, width, channels]`, the same bytes on the device as on the CPU.

        On the CPU without a device, and where only the processor knows how. Otherwise copies its bytes there first.
        """
        own = self._processor
        resampling = None if device is None or not own.do_resize else self._resampling(device)
        is_elsewhere = isinstance(image, Tensor) and image.device.type != "cpu"
        if is_elsewhere and (resampling is None or not _is_of_bytes(_channels_first(image))):
            image, is_elsewhere = image.cpu(), False
        if is_elsewhere:
            decoded = _channels_first(image)
        else:
            decoded = own.process_image(image, do_convert_rgb=own.do_convert_rgb)
        if resampling is not None and device is not None and _is_of_bytes(decoded):
            size = self._size_of(decoded.shape[1:], own.size)
            if size is not None:
                return resampling.resize(_uploaded(decoded, device), *size)
        made = self._resize(decoded, own.size) if own.do_resize else decoded
        return torch.as_tensor(made, device="cpu").movedim(0, -1)

    def _resampling(self, device: torch.device) -> Resampling | None:
        """Return how the processor resizes bytes, found by trying it on this device; `None` if no library does so."""
        if device not in self._found:
            with torch.device("cpu"), torch.inference_mode():
                tried = self._tried()

                def fits(one: Resampling) -> bool:
                    resized = (one.resize(_uploaded(image, device), *made.shape[1:]).cpu() for image, made in tried)
                    return all(got.equal(made.movedim(0, -1)) for got, (_, made) in zip(resized, tried, strict=True))

                self._found[device] = next(filter(fits, RESAMPLINGS), None) if tried else None
        return self._found[device]

    def _resize(self, decoded: Any, size: Any) -> Any:
        own = self._processor
        factors = {"factor": own.patch_size * own.merge_size, "temporal_factor": self._frames}
        return own.resize(decoded, size=size, resample=own.resample, **factors)

    @cached_property
    def _takes_tensors(self) -> bool:
        """True if the processor resizes tensors, by torchvision, and not arrays, by Pillow."""
        probe = numpy.zeros((2, 2, 3), numpy.uint8)
        return isinstance(self._processor.process_image(probe), Tensor)

    def _size_of(self, shape: tuple[int, ...], size: Any) -> tuple[int, int] | None:
        """Return the height and width that the processor gives an image of this shape, without resizing one.

        `None` if it does not say: it asks Pillow for none.
        """
        if self._takes_tensors:
            made = self._resize(torch.empty((3, *shape), dtype=torch.uint8, device="meta"), size)
            return made.shape[-2], made.shape[-1]
        try:
            self._resize(_unpainted()(*shape), size)
        except AskedForSize as asked:
            return asked.height, asked.width
        return None

    def _tried(self) -> list[tuple[Any, Tensor]]:
        """Return synthetic images, decoded, and what the processor resizes them to; none if it does something else."""
        tried = []
        try:
            for image, size in self._synthetic():
                decoded = self._processor.process_image(image)
                made = torch.as_tensor(self._resize(decoded, size), device="cpu")
                same = numpy.array_equal(numpy.moveaxis(numpy.asarray(decoded), 0, -1), image)
                if not same or made.dtype != torch.uint8 or self._size_of(decoded.shape[1:], size) != made.shape[1:]:
                    return []
                tried.append((decoded, made))
        except Exception:  # whatever it is, the processor tells where it matters
            return []
        return tried

    def _synthetic(self) -> Iterator[tuple[Array, Any]]:
        """Return images of noise, and what the processor takes as limits of sizes.

        Images that grow and shrink, in which Pillow resamples either side first, and some that shrink by much.
        """
        own = self._processor
        unit = own.patch_size * own.merge_size
        side = unit * (2 + math.isqrt(max(0, own.size["shortest_edge"])) // unit)
        small = copy.copy(own.size)
        small["shortest_edge"], small["longest_edge"] = unit**2, 16 * unit**2
        shapes = [(unit + 5, 2 * unit - 7), (side + 3, side + 1), (side + 2, side + 1), (side - 3, side + unit + 2)]
        noise = numpy.random.default_rng(0)
        for size, (height, width) in [*((own.size, shape) for shape in shapes), (small, (15 * unit, 9 * unit + 1))]:
            yield noise.integers(0, 256, (height, width, 3), numpy.uint8), size


class AskedForSize(Exception):  # noqa: N818 - no error
    """Pillow was asked for an image of a size."""

    def __init__(self, height: int, width: int) -> None:
        self.height, self.width = height, width


@lru_cache(maxsize=1)
def _unpainted() -> Any:
    """Return a class of pictures of Pillow that have a shape and no pixels, and tell the size they are resized to."""
    from PIL import Image

    class Unpainted(Image.Image):  # type: ignore[misc]  # Pillow is optional
        def __init__(self, height: int, width: int) -> None:
            super().__init__()
            self.shape = (3, height, width)

        def resize(self, size: tuple[int, int], *_: Any, **__: Any) -> Any:
            raise AskedForSize(size[1], size[0])

    return Unpainted


def _is_of_bytes(decoded: Any) -> bool:
    """Return True for an array or a tensor of bytes `[3, height, width]`."""
    return str(decoded.dtype) in ("uint8", "torch.uint8") and decoded.ndim == 3 and len(decoded) == 3


def _channels_first(image: Tensor) -> Tensor:
    """Return an image with its channels first, which are found as processors find them."""
    return image if image.shape[0] in (1, 3, 4) else image.movedim(-1, 0)


def _uploaded(decoded: Any, device: torch.device) -> Tensor:
    """Return an image `[channels, height, width]`, an array or a tensor, as `[height, width, channels]` on a device."""
    if isinstance(decoded, Tensor):
        return decoded.to(device).movedim(0, -1).contiguous()
    return torch.from_numpy(numpy.require(numpy.moveaxis(decoded, 0, -1), requirements=("C", "W"))).to(device)
