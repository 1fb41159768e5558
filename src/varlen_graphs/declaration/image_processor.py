"""Decoded images as arguments of a call: an image processor of transformers resizes them, and graphs do the rest."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from varlen_graphs.errors import InputError, SpecError
from varlen_graphs.inputs.normalize import Normalize
from varlen_graphs.inputs.patches import Patches
from varlen_graphs.kernels.patches.op import patches
from varlen_graphs.layouts.pictures import Pictures, patches_of, real_patches

if TYPE_CHECKING:
    from varlen_graphs.declaration.buffer_spec import BufferSpec

SIZES = [(37, 61), (90, 53), (64, 64)]
"""Heights and widths that a processor is tried on: two that are no multiples of a patch, and a square."""

TOLERANCE = 1e-5
"""Largest relative L2 between what a processor makes of an image and its resized bytes normalised in float32."""


def read_images(
    spec: "BufferSpec", images: Any, names: Collection[str], device: torch.device | None = None
) -> dict[str, Any]:
    """Resize decoded images as the processor of the declaration does, and return the arguments of a call.

    Args:
        spec: A declaration with a processor.
        images: A batch that the processor takes, such as a list of pictures of PIL, arrays or tensors; or one image.
        names: Names of the arguments to return, of those that the processor makes beside the rows.
        device: Where the rows are to be. Images that become patches are resized there, if the processor resizes as
            Pillow or torch does; whole pictures, and all others, on the host.

    Returns:
        The rows, uint8, and other arguments.

    Raises:
        InputError: There is no processor or no image, or resized images are no bytes.
    """
    normalize = spec.row_input.normalize
    if normalize is None or normalize.processor is None:
        raise InputError(
            f"{spec.row_input!r} has no image processor: expected normalize=vg.inputs.Normalize.of(processor), or "
            "vg.inputs.Patches.of(processor) for towers that take patches"
        )
    batch = _as_list(images)
    if not batch:
        raise InputError("there are no images: expected at least one")
    for image in _flat(batch):  # a processor would open a path, or fetch what a URL names
        if not (hasattr(image, "ndim") or hasattr(image, "getbands")):
            raise InputError(
                f"got a {type(image).__name__} as an image: expected a decoded one, a picture of PIL, an array or a "
                "tensor; decode files first, for example by PIL.Image.open"
            )
    if isinstance(normalize, Patches):
        rows, grid = _cut(normalize, batch, device)
        return {spec.row_input.name: rows, spec.layout.name: grid}
    made = _resized(normalize, batch, spec.row_input.name, names)
    return made if device is None else made | {spec.row_input.name: made[spec.row_input.name].to(device)}


def _as_list(images: Any) -> list[Any]:
    if hasattr(images, "ndim"):  # an array or a tensor
        return [*images] if images.ndim > 3 else [images]
    return [*images] if isinstance(images, list | tuple | Iterator) else [images]


def _resized(normalize: Normalize, images: Sequence[Any], pixels: str, names: Collection[str]) -> dict[str, Any]:
    """Return whole pictures, and what the processor makes beside them."""
    processor: Any = normalize.processor
    made = processor(images, do_rescale=False, do_normalize=False, return_tensors="pt")
    rows = made.get(pixels) if isinstance(made, Mapping) else None
    if not isinstance(rows, Tensor) or not torch.equal(rows.byte().to(rows.dtype), rows):
        came = (
            type(made).__name__ if not isinstance(made, Mapping) else [*made] if rows is None else f"other {pixels!r}"
        )
        raise InputError(
            f"{type(processor).__name__} makes {came} when it does not rescale: expected {pixels!r}, a tensor of whole "
            "numbers from 0 to 255"
        )
    return {name: value for name, value in made.items() if name in names} | {pixels: rows.byte()}


def _cut(normalize: Patches, images: Sequence[Any], device: torch.device | None) -> tuple[Tensor, Tensor]:
    """Return the rows of images, uint8 `[rows, *row_shape]`, and `(1, h, w)` of each, in patches, on the CPU."""
    made = [_cut_one(normalize, image, device) for image in _flat(images)]
    grid = [(1, image.shape[0] // normalize.size, image.shape[1] // normalize.size) for image in made]
    return _joined([image.view(-1, *normalize.row_shape) for image in made]), torch.tensor(grid, device="cpu")


def _cut_one(normalize: Patches, image: Any, device: torch.device | None) -> Tensor:
    """Return a resized image, uint8 `[height, width, channels]`, contiguous."""
    if getattr(image, "ndim", 3) != 3:
        raise InputError(f"an image has {image.ndim} dimensions: expected 3, with the channels first or last")
    made = normalize.resizing(image, device)
    channels, size = len(normalize.normalize.mean), normalize.size
    if made.dtype != torch.uint8 or made.shape[2] != channels or made.shape[0] % size or made.shape[1] % size:
        raise InputError(
            f"the processor makes {made.dtype} {list(made.permute(2, 0, 1).shape)} of an image: expected bytes of "
            f"{channels} channels, and sides that are multiples of {size}"
        )
    return made.to(device or made.device).contiguous()


def _joined(rows: Sequence[Tensor]) -> Tensor:
    """Concatenate rows; on the CPU in one thread, because where processors are busy torch's wait for each other."""
    if any(one.device.type != "cpu" for one in rows):
        return torch.cat([*rows])
    return torch.from_numpy(numpy.concatenate([one.numpy() for one in rows]))


def _flat(images: Iterable[Any]) -> Iterator[Any]:
    for image in images:
        if isinstance(image, list | tuple):
            yield from _flat(image)
        else:
            yield image


def check_processor(spec: "BufferSpec") -> None:
    """Check that graphs make of resized bytes what the processor makes of images, by trying it on synthetic ones.

    Several sizes at once and alone: processors may pad a batch after they normalise, swap channels, or resize in
    floating point, and none of their settings tells.

    Raises:
        SpecError: They do not, or the processor takes no image that was tried.
    """
    normalize = spec.row_input.normalize
    if normalize is None or normalize.processor is None:
        return
    processor: Any = normalize.processor
    unit = normalize.size * getattr(spec.layout, "merge", 1) if isinstance(normalize, Patches) else 1
    groups = [SIZES, [(2 * unit, 3 * unit), (5 * unit, 2 * unit)]]  # the second for processors that do not resize
    compared = False
    for sizes in (*groups, *([size] for group in groups for size in group)):
        images = [_noise(*size) for size in sizes]
        try:
            with torch.device("cpu"):  # whatever the default device of the caller is
                expected = processor(images, return_tensors="pt")
        except Exception:  # whatever it is, calls of such images fail, too
            continue
        try:
            with torch.device("cpu"):
                difference = _difference(spec, images, expected)
        except Exception as error:
            raise SpecError(
                f"{type(processor).__name__} cannot be used by encoder.from_images: {error}; leave normalize= out, and "
                "call the encoder with what the processor makes"
            ) from error
        if not difference <= TOLERANCE:
            raise SpecError(
                f"{type(processor).__name__} makes other values of images of {sizes} than their resized bytes have, "
                f"normalised as it says: {difference:.1e} off (relative L2); it may pad after it normalises, resize in "
                "floating point, or have patches in another order; leave normalize= out, and call the encoder with "
                "what the processor makes"
            )
        compared = True
    if not compared:
        raise SpecError(
            f"{type(processor).__name__} refuses images of all sizes that were tried, {SIZES} among them: expected one "
            "that resizes"
        )


def _noise(height: int, width: int) -> Any:
    """Return a picture whose pixels all differ, uint8 `[height, width, 3]`."""
    generator = torch.Generator().manual_seed(height * width)
    return torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8, device="cpu").numpy()


def _difference(spec: "BufferSpec", images: Sequence[Any], expected: Mapping[str, Any]) -> float:
    """Return the relative L2 between the resized bytes of images, normalised, and what the processor makes of them."""
    normalize, layout = spec.row_input.normalize, spec.layout
    arguments = read_images(spec, images, {layout.name})
    rows, sizes = arguments[spec.row_input.name], arguments.get(layout.name)
    if isinstance(normalize, Patches):
        assert isinstance(sizes, Tensor)  # noqa: S101 - it was just made
        constants, theirs = normalize.constants.on(rows.device), expected["pixel_values"]
        merge = getattr(layout, "merge", 1)
        ours = patches(sizes, rows, constants, normalize.size, normalize.frames, merge, torch.float32)
    else:
        assert normalize is not None  # noqa: S101 - the caller asks
        ours, theirs = normalize(rows, torch.float32), expected[spec.row_input.name]
    if ours.shape != theirs.shape:
        return float("inf")
    if isinstance(layout, Pictures):  # whose padding no graph reads
        items = torch.tensor(layout.parse(layout.missing(rows.shape) if sizes is None else sizes), device="cpu")
        ours, theirs = (patches_of(x, layout.patch) for x in (ours, theirs))
        real = real_patches(items[:, 1], items[:, 2], ours.shape[1:3])
        ours, theirs = ours[real], theirs[real]
    difference = (ours - theirs.float()).norm() / theirs.float().norm()
    return float(difference)
