"""Calls of whole models that reach their towers: six layouts each, in the form that the model accepts."""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import varlen_graphs as vg
from varlen_graphs.recipes.automatic.flattened_patches import PATCHES
from varlen_graphs.recipes.automatic.ways import SOUND
from varlen_graphs.recipes.sound.speech import CLIP_MASK, ClipMask

GRIDS = [[(8, 8)], [(8, 12), (4, 4)], [(4, 8), (12, 8), (8, 8)], [(16, 8)], [(4, 4)] * 5, [(12, 12), (4, 20)]]
COUNTS = [1, 2, 3, 5, 7, 4]
LENGTHS = [[30], [30, 7], [5, 60, 33], [50], [9] * 5, [64, 1, 17, 40]]
CLIPS = [[100], [100, 60], [80, 37, 100], [33], [100] * 5, [64, 96]]
TOWERS = ("vision_tower", "vision_model", "visual", "audio_tower", "encoder", "speech_encoder")


class Form(NamedTuple):
    """A function of a model that runs a tower, and its arguments for each layout."""

    function: str
    calls: list[dict[str, Any]]


def forms(model: nn.Module, encoder: bool = False) -> Iterator[tuple[str, list[Form]]]:
    """Yield, by the modality, the forms in which a model may take its inputs: first its own functions for features.

    A model of sound without one is called itself.
    """
    first = next(iter(parameters(model.forward)), "")
    if encoder:
        make = texts if first == "input_ids" else sounds if first in SOUND else images
        yield "encoder", [Form("", calls) for calls in make(model, model.forward, first)]
        return
    called = False
    for kind, make in KINDS.items():
        path = f"get_{kind}_features"
        function = find(model, path)
        if function is not None:
            called |= kind != "text"
            rows = next(iter(parameters(function)), "")
            yield kind, [Form(path, calls) for calls in make(model, function, rows)]
    if first in (*SOUND, "inputs") or PATCHES in parameters(model.forward):
        make = pages if PATCHES in parameters(model.forward) else sounds
        yield "the model", [Form("", calls) for calls in make(model, model.forward, first)]
    elif not called:
        for path in towers(model):
            module = find(model, path)
            first = next(iter(inspect.signature(module.forward).parameters), "")
            make = sounds if first.startswith("input_f") else pages if first == PATCHES else images
            yield path, [Form(path, calls) for calls in make(model, module.forward, first)]


def direct_calls(tower: nn.Module, spec: vg.BufferSpec) -> list[dict[str, Any]]:
    """Calls of a tower itself, by its declaration: batches, texts, or items of some sizes."""
    packed, layout = spec.row_input, spec.layout
    if PATCHES in parameters(tower.forward):
        return [{PATCHES: flattened(own, math.prod(packed.shape or ()), seed)} for seed, own in enumerate(GRIDS)]
    if layout.one_row:
        sizes = [count for count in COUNTS if count > 1]
        shape = layout.usual or ()
        calls = [{packed.name: seeded(n, *shape, seed=n)} for n in sizes]
        if packed.dtype is not None:
            calls = [{packed.name: torch.randint(5, 190, (n, 20))} for n in sizes]
        return [
            call | {one.name: required(one, n) for one in spec.inputs} for call, n in zip(calls, sizes, strict=True)
        ]
    if isinstance(layout, ClipMask):
        unit, shape = 1 if packed.shape else 64, packed.shape or ()
        mask = None if layout.name == CLIP_MASK else layout.name
        left = {n: None for n, p in parameters(tower.forward).items() if mask is None and n.endswith("mask")}
        return [clips(packed.name, mask, [unit * rows for rows in own], shape) | left for own in CLIPS]
    if layout.name.endswith("position_ids"):
        return [placed(packed.name, layout.name, own, packed.shape or (), seed) for seed, own in enumerate(GRIDS)]
    if layout.name.endswith("mask"):
        return batches(packed.name, layout.name)
    has_lengths = layout.name.endswith(("lens", "lengths"))
    calls = []
    for seed, own in enumerate(CLIPS if has_lengths else GRIDS):
        items = own if has_lengths else [(1, h, w) for h, w in own] if layout.name.endswith("thw") else own
        count = sum(math.prod(item) if isinstance(item, tuple) else item for item in items)
        shape = packed.argument_shape((count,), packed.shape or ())
        calls.append({packed.name: seeded(*shape, seed=seed), layout.name: torch.tensor(items)})
    return calls


def flattened(sizes: list[tuple[int, int]], pixels: int, seed: int) -> Tensor:
    """A batch of patches behind their lines and columns, which begin at 1, and its padding of zeros."""
    batch = torch.zeros(len(sizes), max(h * w for h, w in sizes) + 2, 2 + pixels)
    for own, (h, w) in zip(batch, sizes, strict=True):
        own[: h * w, 0], own[: h * w, 1] = torch.arange(h).repeat_interleave(w) + 1, torch.arange(w).repeat(h) + 1
        own[: h * w, 2:] = seeded(h * w, pixels, seed=seed)
    return batch


def required(one: vg.inputs.PerItem, count: int) -> Tensor:
    """A tensor beside a batch: its default, or ones."""
    return torch.full((count, *one.shape), one.default if one.default is not None else 1, dtype=one.dtype)


def batches(rows: str, mask: str, pad: int = 1, end: int | None = None) -> list[dict[str, Any]]:
    """Batches of texts of mixed lengths, and their masks."""
    calls = []
    for seed, lengths in enumerate(LENGTHS):
        real = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        ids = torch.randint(5, 190, real.shape, generator=torch.Generator().manual_seed(seed))
        if end is not None:
            ids[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = end
        calls.append({rows: ids * real + pad * (1 - real), mask: real})
    return calls


def find(model: nn.Module, path: str) -> Any:
    """A function or module of the model inside a model, or of the model; the model itself for an empty path."""
    if not path:
        return model
    for inside in (getattr(model, "model", None), getattr(model, "thinker", None), model):
        try:
            found = inside.get_submodule(path) if "." in path else getattr(inside, path, None)
        except AttributeError:
            continue
        if found is not None:
            return found
    return None


def texts(model: nn.Module, function: Callable[..., Any], rows: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the calls of a text encoder: batches of mixed lengths, with and without their masks."""
    ids = [config_value(model, (name,), ("text_config", ""), None) for name in ("pad_token_id", "eos_token_id")]
    pad, end = (one if isinstance(one, int) and one >= 0 else None for one in ids)
    limit = config_value(model, ("max_position_embeddings",), ("text_config", ""), 64)
    for calls in (batches(rows, "attention_mask", 1 if pad is None else pad, end), batches(rows, "attention_mask")):
        calls = [{name: value[:, :limit] for name, value in call.items()} for call in calls]
        yield calls
    yield [{rows: call[rows]} for call in calls]


def towers(model: nn.Module) -> list[str]:
    """The names of the towers of a model without functions for features."""
    return [name for name in TOWERS if isinstance(find(model, name), nn.Module)]


def parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a function, through decorators and `*args`."""
    found = inspect.signature(inspect.unwrap(function)).parameters
    return {name: p for name, p in found.items() if name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def config_value(model: Any, names: tuple[str, ...], inside: tuple[str, ...], default: Any) -> Any:
    """The first of these settings in the configuration of a tower."""
    for part in inside:
        config = model.config
        for inner in filter(None, part.split(".")):
            config = getattr(config, inner, None)
        for name in names:
            value = getattr(config, name, None)
            if value is not None:
                return value
    return default


def all_values(model: Any, names: tuple[str, ...], inside: tuple[str, ...]) -> list[int]:
    """All of these settings in the configuration of a tower, without those that repeat."""
    found = [config_value(model, (name,), (part,), None) for part in inside for name in names]
    return [*dict.fromkeys(one for one in found if isinstance(one, int))]


VISION = (
    "vision_config", "visual_config", "", "vision", "perception_config", "backbone_config", "thinker_config",
    "vq_config", "encoder.vision_config",
)  # fmt: skip
BINS = (
    "feature_projection_input_dim",
    "num_mel_bins",
    "n_mels",
    "n_mel_bins",
    "input_dim",
    "feature_size",
    "input_size",
)
AUDIO = (
    "audio_config",
    "",
    "audio_encoder_config",
    "encoder_config",
    "speech_config",
    "acoustic_tokenizer_encoder_config",
)


def side(model: Any) -> int:
    """Pixels a side of the images of a model."""
    size = config_value(model, ("image_size", "input_size", "resolution"), VISION, 224)
    return int(size[0] if isinstance(size, list | tuple) else size)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers, the same in each run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def row_shapes(model: nn.Module) -> list[tuple[int, ...]]:
    """Shapes of patches that some module of the vision tower takes, flat or not."""
    shapes: dict[tuple[int, ...], None] = {}
    for name, module in model.named_modules():
        if "patch" not in name and "embed" not in name:
            continue
        if isinstance(module, nn.Conv2d | nn.Conv3d) and module.weight.shape[1] in (1, 3):
            shapes[(module.weight[0].numel(),)] = None
            shapes[tuple(module.weight.shape[1:])] = None
        elif isinstance(module, nn.Linear) and "patch" in name and "text" not in name:
            shapes[(module.in_features,)] = None
    channels = config_value(model, ("num_channels",), VISION, 3)
    size = config_value(model, ("patch_size",), VISION, 16)
    if isinstance(size, int):  # as Inkling takes them, in blocks of merged patches, or of some frames
        merged = size * config_value(model, ("spatial_merge_size",), VISION, 2)
        frames = config_value(model, ("temporal_patch_size",), VISION, 2)
        return [*[*shapes][:6], (merged, merged, channels), (frames, size, size, channels)]
    return [*shapes][:6]


def images(model: nn.Module, function: Callable[..., Any], rows: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the calls of a function of images in every form that its arguments allow, of several sizes first."""
    takes = parameters(function)
    rows = next((name for name in takes if name.startswith("pixel_values")), rows)
    grid = next((n for n in takes if n.endswith(GRID_NAMES)), None)
    if grid == "spatial_shapes" and "pixel_attention_mask" in takes:
        patch = 3 * config_value(model, ("patch_size",), VISION, 16) ** 2
        yield [masked(rows, grid, own, patch, seed) for seed, own in enumerate(GRIDS)]
    if grid is not None:
        yield from patches(model, rows, grid, takes, 1)
    size = side(model)
    others = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
    fixed = {n: v for n, v in others.items() if n in takes and takes[n].default is inspect.Parameter.empty}
    mask = next((name for name in takes if name in ("pixel_mask", "pixel_attention_mask")), None)
    if mask is not None:
        patch = config_value(model, ("patch_size",), VISION, 16)
        for tiles in ((3,), ()):
            yield [in_frames(rows, mask, n, tiles, size, patch) for n in COUNTS]
        tiled = [torch.arange(3) < torch.tensor([2, 3, 1])[torch.arange(n) % 3, None] for n in COUNTS]
        yield [{rows: seeded(len(real), 3, 3, size, size, seed=len(real)), mask: real} for real in tiled]
    if "image_sizes" in takes:
        patch = config_value(model, ("patch_size",), VISION, 14) * config_value(
            model, ("spatial_merge_size",), ("",), 1
        )
        yield [of_sizes(rows, n, size, patch) | fixed for n in COUNTS]
    for channels_first in (True, False):
        shape = (3, size, size) if channels_first else (size, size, 3)
        one = [{rows: seeded(n, *shape, seed=n)} | fixed for n in COUNTS]
        if "image_sizes" in takes:
            yield [call | {"image_sizes": torch.tensor([[size, size]] * len(call[rows]))} for call in one]
        yield one
        if "input_ids" in takes:
            yield [call | {"input_ids": torch.randint(5, 190, (len(call[rows]), 7))} for call in one]
        if "qformer_input_ids" in takes:
            yield [call | {"qformer_input_ids": torch.ones(len(call[rows]), 5, dtype=torch.long)} for call in one]
        if "high_res_pixel_values" in takes:
            config: Any = model.config
            fine = config.high_res_vision_config.image_size
            yield [call | {"high_res_pixel_values": seeded(len(call[rows]), 3, fine, fine)} for call in one]
    for count in (3, 2, 5):
        tiled = [{rows: seeded(n, count, 3, size, size, seed=n)} | fixed for n in COUNTS]
        if "image_sizes" in takes:
            for high, wide in ((1, 2), (1, 1), (2, 2)):
                whole = [size * high, size * wide]
                yield [call | {"image_sizes": torch.tensor([whole] * len(call[rows]))} for call in tiled]
        if mask is not None:
            yield [call | {mask: torch.ones(*call[rows].shape[:2], size, size).bool()} for call in tiled]
        yield tiled
    if "image_token_pooling" in takes:
        yield [pooled(model, n) for n in COUNTS]
    if "image_position_ids" in takes:
        patch = 3 * config_value(model, ("patch_size",), VISION, 16) ** 2
        yield [placed(rows, "image_position_ids", own, (patch,), seed) for seed, own in enumerate(GRIDS)]
    if "aspect_ratio_ids" in takes:
        yield [aspects(model, n, size) for n in COUNTS]
    frames = config_value(model, ("num_frames",), VISION, 8)
    yield [{rows: seeded(n, frames, 3, size, size, seed=n)} for n in COUNTS]
    if parameters(function).keys() == {rows}:  # blocks of patches of some frames
        for shape in row_shapes(model):
            yield [{rows: seeded(8 * n, *shape, seed=n)} for n in COUNTS]


def in_frames(rows: str, mask: str, count: int, tiles: tuple[int, ...], size: int, patch: int) -> dict[str, Any]:
    """A call with pictures of several sizes, each in the corner of a square, and the mask of their pixels."""
    real = torch.zeros(count, *tiles, size, size, dtype=torch.bool)
    for seed, one in enumerate(real.view(-1, size, size)):
        one[: size - seed % 3 * patch, : size - (seed + 1) % 2 * patch] = True
    return {rows: seeded(count, *tiles, 3, size, size, seed=count) * real.unsqueeze(-3), mask: real}


def of_sizes(rows: str, count: int, size: int, patch: int) -> dict[str, Any]:
    """A call with pictures of several sizes, each in the corner of a square, and their sizes."""
    sizes = [(size - seed % 3 * patch, size - (seed + 1) % 2 * patch) for seed in range(count)]
    sizes[0] = size, size
    pixels = torch.zeros(count, 3, size, size)
    for one, (h, w) in zip(pixels, sizes, strict=True):
        one[:, :h, :w] = seeded(3, h, w, seed=count)
    return {rows: pixels, "image_sizes": torch.tensor(sizes)}


def pages(model: nn.Module, function: Callable[..., Any], rows: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the calls of a function of flattened patches: pages of several sizes, and the mask of their patches."""
    config: Any = model.config
    calls, pixels = [], 3 * config_value(model, ("patch_size",), VISION, 16) ** 2
    for seed, own in enumerate(GRIDS):
        batch = flattened(own, pixels, seed)
        call: dict[str, Any] = {PATCHES: batch}
        takes = parameters(function)
        places = "image_embeds_position_mask"
        if "decoder_input_ids" in takes:
            call["decoder_input_ids"] = torch.ones(len(own), 3, dtype=torch.long)
        if places in takes:
            call[places] = (
                (torch.arange(config.latent_query_num + 3) < config.latent_query_num).long().repeat(len(own), 1)
            )
            call["input_ids"] = call[places] + 1
        else:
            call["attention_mask"] = (batch[..., 0] > 0).float()
        calls.append(call)
    yield calls


def masked(rows: str, grid: str, sizes: list[tuple[int, int]], width: int, seed: int) -> dict[str, Any]:
    """A call of SigLIP 2: a padded batch of the patches of images, its mask, and their sizes."""
    shapes = torch.tensor(sizes)
    mask = torch.arange(int(shapes.prod(1).max())) < shapes.prod(1, keepdim=True)
    pixels = seeded(*mask.shape, width, seed=seed) * mask[..., None]
    return {rows: pixels, "pixel_attention_mask": mask.long(), grid: shapes}


def placed(rows: str, places: str, sizes: list[tuple[int, int]], shape: Sequence[int], seed: int) -> dict[str, Any]:
    """A call of Gemma 4: a padded batch of the patches of images, and their places, -1 in padding."""
    positions = torch.full((len(sizes), max(h * w for h, w in sizes), 2), -1)
    for own, (h, w) in zip(positions, sizes, strict=True):
        own[: h * w] = torch.cartesian_prod(torch.arange(h), torch.arange(w)).flip(1)
    real = (positions >= 0).all(-1, keepdim=True)
    return {rows: seeded(*positions.shape[:2], *shape, seed=seed).clamp(0, 1) * real, places: positions}


def pooled(model: nn.Module, count: int) -> dict[str, Any]:
    """A call of Molmo 2: each token is made of one patch."""
    config: Any = model.config.vision_config
    patches, side = config.num_position_embeddings, math.isqrt(config.num_position_embeddings)
    return {
        "pixel_values": seeded(count, patches, 3 * config.patch_size**2, seed=count),
        "image_token_pooling": torch.arange(count * patches)[:, None],
        "image_grids": torch.tensor([[0, 0, side, side]] * count),
        "output_hidden_states": True,
    }


def aspects(model: nn.Module, count: int, size: int) -> dict[str, Tensor]:
    """A call with tiles and the aspect ratio of each image."""
    tiles = config_value(model, ("max_num_tiles",), VISION, 4)
    mask = torch.ones(count, 1, tiles, dtype=torch.long)
    pixels = seeded(count, 1, tiles, 3, size, size, seed=count)
    return {
        "pixel_values": pixels,
        "aspect_ratio_ids": torch.ones(count, 1, dtype=torch.long),
        "aspect_ratio_mask": mask,
    }


GRID_NAMES = ("grid_thw", "grid_hw", "spatial_shapes", "target_sizes", "target_sizes_videos")
"""Ends of names of arguments that hold the sizes of items."""


def patches(
    model: nn.Module, rows: str, grid: str, takes: dict[str, Any], frames: int
) -> Iterator[list[dict[str, Any]]]:
    """Yield calls with the patches of all items one after another, or of each item padded."""
    for shape in row_shapes(model):
        calls = []
        for seed, sizes in enumerate(GRIDS):
            count = sum(frames * h * w for h, w in sizes)
            items = [[frames, h, w] if grid.endswith("thw") else [h, w] for h, w in sizes]
            call = {rows: seeded(count, *shape, seed=seed), grid: torch.tensor(items)}
            merge = next((name for name in takes if name.endswith("merge_sizes")), None)
            calls.append(call | ({merge: torch.full((len(items),), frames)} if merge else {}))
        if "target_sizes" in grid and len(shape) == 3:  # side by side, as MiniCPM-V takes them
            yield [{**call, rows: call[rows].permute(1, 2, 0, 3).flatten(2)[None]} for call in calls]
        yield calls
        yield [{**call, rows: call[rows][None]} for call in calls]
        if "pixel_attention_mask" in takes:
            yield [padded(call[rows], call[grid], rows, grid) for call in calls]


def padded(x: Tensor, sizes: Tensor, rows: str, grid: str) -> dict[str, Tensor]:
    """A batch of patches padded to the longest item, and its mask."""
    lengths = sizes.prod(-1).tolist()
    batch = nn.utils.rnn.pad_sequence([*x.split(lengths)], batch_first=True)
    mask = (torch.arange(batch.shape[1]) < torch.tensor(lengths)[:, None]).long()
    return {rows: batch, grid: sizes, "pixel_attention_mask": mask}


def videos(model: nn.Module, function: Callable[..., Any], rows: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the calls of a function of videos."""
    takes = parameters(function)
    rows = next((name for name in takes if name.startswith("pixel_values")), rows)
    grid = next((n for n in takes if n.endswith("grid_thw")), None)
    if grid is not None:
        for frames in (2, 1):
            yield from patches(model, rows, grid, takes, frames)
    size = side(model)
    if "target_sizes_videos" in takes:  # the frames of one video, of one size
        patch = config_value(model, ("patch_size",), VISION, 14)
        sizes = torch.tensor([[8, 8]])
        yield [{rows: seeded(n, 3, patch, 64 * patch, seed=n), "target_sizes_videos": sizes} for n in COUNTS]
    if "num_frames_per_video" in takes:
        patch = 3 * config_value(model, ("patch_size",), VISION, 16) ** 2
        calls = [placed(rows, "video_position_ids", own, (patch,), n) for n, own in enumerate(GRIDS)]
        yield [call | {"num_frames_per_video": torch.tensor([len(call[rows])])} for call in calls]
    if "video_token_pooling" in takes:
        names = {"pixel_values": rows, "image_token_pooling": "video_token_pooling"}
        calls = [{names.get(name, name): value for name, value in pooled(model, n).items()} for n in COUNTS]
        for call, n in zip(calls, COUNTS, strict=True):
            call["video_grids"] = call.pop("image_grids")[:, 1:] + torch.tensor([1, 0, 0])
            call["video_grids"] = call["video_grids"][:n]
        yield calls
    for frames in dict.fromkeys([config_value(model, ("num_frames",), VISION, 2), 2, 4]):
        one = [{rows: seeded(n, frames, 3, size, size, seed=n)} for n in COUNTS]
        yield one
        if "qformer_input_ids" in takes:
            yield [call | {"qformer_input_ids": torch.ones(len(call[rows]), 5, dtype=torch.long)} for call in one]
    yield [{rows: seeded(n, 3, 2, size, size, seed=n)} for n in COUNTS]
    yield [{rows: seeded(n, 3, size, size, seed=n)} for n in COUNTS]


def sounds(model: nn.Module, function: Callable[..., Any], rows: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the calls of a function of sound: spectrograms, batches with a mask, or waveforms.

    Decoders get two tokens.
    """
    for calls in _sounds(model, function, rows):
        if "decoder_input_ids" in parameters(function):
            calls = [c | {"decoder_input_ids": torch.ones(batch_of(c), 2, dtype=torch.long)} for c in calls]
        yield calls


def batch_of(call: dict[str, Any]) -> int:
    """The clips of a call."""
    return len(next(iter(call.values())))


def _sounds(model: nn.Module, function: Callable[..., Any], rows: str) -> Iterator[list[dict[str, Any]]]:
    takes = parameters(function)
    rows = next((n for n in takes if n.startswith("input_") and "mask" not in n), rows)
    bins = all_values(model, BINS, AUDIO) or [128]
    mels = bins[0]
    whole = config_value(model, ("max_length",), ("",), 0) or 2 * config_value(
        model, ("max_source_positions",), AUDIO, 1500
    )
    fixed = config_value(model, ("max_length", "max_source_positions"), ("", *AUDIO), 0)
    masks = [n for n in takes if n.endswith("mask") and not n.startswith(("output", "decoder", "head", "cross"))]
    mask = masks[0] if masks else None
    of_group = getattr(model.config, "feat_extract_norm", None) == "group"  # for which processors make no mask
    if len(masks) > 1:  # of chunks, all of one length
        calls = []
        for count in COUNTS:
            real = torch.arange(whole) < whole - 100 * (torch.arange(count) % 3)[:, None]
            calls.append({rows: seeded(count, mels, whole, seed=count)} | dict.fromkeys(masks, real.long()))
        yield calls
    if mask and not of_group:
        unit = config_value(model, ("samples_per_token",), AUDIO, 64)
        for width in bins:
            yield [clips(rows, mask, own, (width,)) for own in CLIPS]
        for samples in (64, 256):  # heads that take the statistics of frames take no few
            yield [clips(rows, mask, [samples * length for length in own], ()) for own in CLIPS]
        if unit != 64:
            yield [clips(rows, mask, [unit * length // 8 for length in own], (), unit) for own in CLIPS]
    if "chunk_sample_lengths" in takes:
        yield [chunked(model, rows, own) for own in CLIPS]
    if rows.endswith("_ids"):
        for width in bins:
            calls = [clips(rows, mask, own, (width,)) for own in CLIPS]
            yield [call | {rows: call[rows].abs().long().clamp(max=3)} for call in calls]
    longest = config_value(model, ("max_length",), ("",), 0)
    if longest:
        yield [{rows: seeded(n, longest, mels, seed=n)} for n in COUNTS]
    for length, width in product(dict.fromkeys([whole, 3000, 200] if fixed else [200, whole]), bins):
        for shape in ((width, length), (length, width)):
            calls = [{rows: seeded(n, *shape, seed=n)} for n in COUNTS]
            if mask:
                yield [call | {mask: torch.ones(len(call[rows]), length).long()} for call in calls]
            yield calls
    batches = []
    for seed, own in enumerate(CLIPS):
        real = (torch.arange(max(own)) < torch.tensor(own)[:, None]).long()
        batches.append({rows: seeded(len(own), mels, max(own), seed=seed), (mask or "attention_mask"): real})
    yield batches
    for samples in (64, 256):
        yield [clips(rows, None, [samples * length for length in own], ()) for own in CLIPS]
    yield [{rows: seeded(n, 1, 3840, seed=n)} for n in COUNTS]


def chunked(model: nn.Module, rows: str, lengths: list[int]) -> dict[str, Any]:
    """A call of dots3.note: chunks of sound, and the samples of each."""
    mels = config_value(model, ("num_mel_bins",), AUDIO, 128)
    whole = 2 * config_value(model, ("max_source_positions",), AUDIO, 1500)
    return {
        rows: seeded(len(lengths), mels, whole, seed=sum(lengths)),
        "chunk_sample_lengths": torch.tensor(lengths) * 160,
    }


def clips(
    rows: str, mask: str | None, lengths: list[int], shape: tuple[int, ...], multiple: int = 8
) -> dict[str, Tensor]:
    """A batch of clips of some lengths, padded with zeros to a multiple, and its mask."""
    real = torch.arange(-(-max(lengths) // multiple) * multiple) < torch.tensor(lengths)[:, None]
    batch = seeded(*real.shape, *shape, seed=sum(lengths)) * real.view(*real.shape, *[1] * len(shape))
    return {rows: batch, mask: real.long()} if mask else {rows: batch}


KINDS = {"image": images, "video": videos, "audio": sounds, "text": texts, "multimodal": images}
"""What makes the calls of a function for features, by what it is of."""
