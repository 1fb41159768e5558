"""MiniCPM-V 2.5, 2.6, 4.0 and 4.5: vision transformer and resampler in one graph, slices packed instead of padded.

Follows the modules that come with the weights, whose submodules it calls by name: `vpm` (`SiglipVisionTransformer` in
`modeling_navit_siglip.py`; for 2.5 `Idefics2VisionTransformer` of transformers, which differs in positions only) and
`resampler`. These take slices `[3, patch, patch * patches]`, padded to a batch. Here the patches of all slices are
rows, packed by `pack_slices`.

In 2.5 the mask of a batch of slices is True everywhere, so real patches attend to padding, and a slice depends on the
longest one beside it. Packed slices equal those that 2.5 encodes one by one, with `batch_vision_input: false`.
"""

import copy
from collections.abc import Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from varlen_graphs.attention.api import TileSchedule
from varlen_graphs.attention.backends import AttentionBackend
from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.buffers import Lookup
from varlen_graphs.buffers.axes import Axis
from varlen_graphs.buffers.sincos import RowEntries
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import InputError, SpecError
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.recipes.blocks import patch_convolution, siglip_layers
from varlen_graphs.recipes.families.resampler import (
    TIMES,
    Keys,
    check_resampler,
    is_temporal,
    queries_of,
    resample,
    resampler_buffers,
    slice_budgets,
    slices,
)
from varlen_graphs.recipes.towers import attention_buffers, check_parts

LARGEST: dict[tuple[Axis, ...], int] = {("h", "w"): 1024, ("row",): 2048}
"""Largest number of patches, per side or in total, with position ids. Slices have about 1024 patches in total."""


class MiniCPMVTower(nn.Module):
    """The two modules of a model that process images. Its own forward runs them as they are, slice by slice."""

    def __init__(self, vpm: Any, resampler: Any) -> None:
        super().__init__()
        self.vpm = vpm
        self.resampler = resampler
        self.training = False  # it has no dropout of its own

    def forward(self, patches: Tensor, tgt_sizes: Tensor) -> Tensor:
        """Encode packed slices, `[slices, queries, dim]`."""
        sizes = tgt_sizes.int()
        out: Tensor = self.resampler(self._features(patches, sizes), sizes)
        return out

    def _features(self, patches: Tensor, sizes: Tensor) -> Tensor:
        """Return the features of all slices, padded to `[slices, patches, vision_dim]`."""
        _, channels, patch, _ = self.vpm.embeddings.patch_embedding.weight.shape
        features = []
        for rows, size in zip(patches.split(sizes.prod(1).tolist()), sizes, strict=True):
            one = rearrange(rows, "patches (c i j) -> 1 c i (patches j)", c=channels, i=patch)
            given = {"tgt_sizes": size[None]} if takes_sizes(self.vpm) else {}
            mask = torch.ones(1, 1, len(rows), dtype=torch.bool, device=rows.device)
            features.append(self.vpm(one, patch_attention_mask=mask, **given).last_hidden_state[0])
        return nn.utils.rnn.pad_sequence(features, batch_first=True)


class TemporalTower(MiniCPMVTower):
    """The two modules of MiniCPM-V 4.5, which encodes groups of slices."""

    def forward(self, patches: Tensor, tgt_sizes: Tensor, temporal_ids: Any = None) -> Tensor:
        """Encode packed slices, `[groups, queries, dim]`."""
        sizes = tgt_sizes.int()
        groups = None if temporal_ids is None else TIMES.nested(temporal_ids, len(sizes))
        out: Tensor = self.resampler(self._features(patches, sizes), sizes, groups)
        return out


def minicpmv(
    vpm: Any, resampler: Any, budgets: Budgets | None = None, *, attention: AttentionBackend = "auto", **options: Any
) -> GraphedEncoder:
    """Graph vision transformer and resampler of MiniCPM-V 2.5, 2.6, 4.0 or 4.5 as one encoder.

    The encoder takes `patches` `[rows, 3 * patch * patch]`, the concatenated slices (`pack_slices`), and `tgt_sizes`
    `[slices, 2]`, their `(h, w)` in patches. It returns `[slices, queries, dim]`.

    For 4.5 it also takes `temporal_ids`, nested as the processor returns them, one integer per slice: in
    `[[-1], [-1], [2, 6, 9]]` the last three slices form a group, and -1 and `None` mean no time. It returns
    `[groups, queries, dim]`. If `temporal_ids` are missing or flat, every slice is a group.

    Args:
        vpm: `model.vpm` of a whole model. If its forward takes no `tgt_sizes`, as in 2.5, positions are those of one
            long row of patches, as the installed transformers computes them in the dtype of `vpm`, and slices equal
            those of a model with `batch_vision_input: false`: as 2.5 is shipped, slices attend to padding.
        resampler: `model.resampler`; with temporal positions it is that of 4.5.
        budgets: As for `GraphedEncoder`, in patches. `None` is `Ladder()` with room for `max(4, rows // 256)` slices.
        attention: The attention backend.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: A module lacks a submodule or attribute, the attention of the resampler is adapted, or the resampler
            was built with `batch_3d_resampler: false`.
    """
    check_parts(vpm, ("embeddings", "encoder", "post_layernorm"), "the vision transformer of MiniCPM-V, model.vpm")
    check_resampler(resampler)
    embeddings, two_sides = vpm.embeddings, takes_sizes(vpm)
    axes: tuple[Axis, ...] = ("h", "w") if two_sides else ("row",)
    side = embeddings.num_patches_per_side
    of_size = partial(position_buckets, side=side) if two_sides else partial(row_positions, embeddings)

    def forward(
        tower: Any, patches: Tensor, tgt_sizes: Tensor, cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule,
        buckets: Tensor, cu_queries: Tensor, cu_keys: Tensor, max_keys: int, query_schedule: TileSchedule,
        key_positions: RowEntries, key_times: RowEntries | None = None,
    ) -> Tensor:  # fmt: skip
        embeddings, layers = tower.vpm.embeddings, tower.vpm.encoder.layers
        position = buckets[:, 0]
        if buckets.shape[1] == 2:
            position = position * embeddings.num_patches_per_side + buckets[:, 1]
        x = patch_convolution(patches, embeddings.patch_embedding) + embeddings.position_embedding(position)
        normed = siglip_layers(layers, x, tower.vpm.post_layernorm, cu_seqlens, max_seqlen, schedule, attention)
        keys = Keys(len(tgt_sizes), cu_queries, cu_keys, max_keys, query_schedule, key_positions, key_times)
        return resample(tower.resampler, normed, keys, attention)

    spec = BufferSpec(
        rows=InputRows("patches", shape=(embeddings.patch_embedding.weight[0].numel(),)),
        layout=slices(resampler),
        buffers=[
            *attention_buffers(vpm.encoder.layers[0].self_attn, "item"),
            Lookup("buckets", of_size, axes=axes, largest=LARGEST[axes]),
            *resampler_buffers(resampler),
        ],
        outputs=queries_of(resampler),
        declared_by="recipe",
    )
    tower = (TemporalTower if is_temporal(resampler) else MiniCPMVTower)(vpm, resampler)
    return GraphedEncoder(tower, slice_budgets() if budgets is None else budgets, spec, forward=forward, **options)


def pack_slices(slices: Sequence[Tensor]) -> Tensor:
    """Pack slices into the rows that the encoder of `minicpmv` takes.

    Args:
        slices: Slices as the processor returns them, `[3, patch, patch * patches]` each.

    Returns:
        `[patches, 3 * patch * patch]`, of the dtype and on the device of the slices.

    Raises:
        InputError: `slices` is empty, or a slice has another shape.
    """
    patch = slices[0].shape[1] if len(slices) and slices[0].dim() == 3 else 0
    for index, one in enumerate(slices):
        if one.dim() != 3 or one.shape[:2] != slices[0].shape[:2] or patch == 0 or one.shape[2] % patch:
            raise InputError(
                f"slices[{index}] is {list(one.shape)}: expected [3, patch, patch * patches], of one patch size"
            )
    if not patch:
        raise InputError("slices is empty: expected at least one; skip the call if there is nothing to encode")
    rows = [rearrange(one, "c i (patches j) -> patches (c i j)", j=patch) for one in slices]
    return torch.cat(rows)


def position_buckets(size: int, side: int) -> Tensor:
    """Return the position, 0 to `side - 1`, of each patch along a side of `size` patches, int64 `[size]` on the CPU."""
    # These are the expressions of the original, in float32, its default dtype: others round differently, and 25
    # patches, for example, would get other positions.
    step = (1 / torch.tensor(size, dtype=torch.float32, device="cpu")).item()
    boundaries = torch.arange(1 / side, 1.0, 1 / side, dtype=torch.float32, device="cpu")
    coordinates = torch.arange(0, 1 - 1e-6, step, dtype=torch.float32, device="cpu")
    return torch.bucketize(coordinates, boundaries, right=True)


class _Shape(nn.Module):
    """Stands in for a patch convolution: returns nothing but the shape of its output."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        patch = pixel_values.shape[2]
        return pixel_values[:, :1, ::patch, ::patch]


class _Ids(nn.Module):
    """Stands in for a table of positions: keeps the ids that it is asked for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.empty(0, device=device)

    def forward(self, ids: Tensor) -> Tensor:
        self.ids = ids
        return ids[..., None]


@torch.no_grad()
def row_positions(embeddings: Any, size: int) -> Tensor:
    """Return the position ids that embeddings give to one row of `size` patches, int64 `[size]` on the CPU.

    Runs their own forward, on their device and in their dtype, with proxies for both of their submodules: versions of
    transformers compute the ids differently, and some in the dtype of the pixels.
    """
    patch, weight = embeddings.patch_size, next(embeddings.parameters())
    probe, table = copy.copy(embeddings), _Ids(weight.device)
    vars(probe)["_modules"] = {"patch_embedding": _Shape(), "position_embedding": table}
    pixels = torch.zeros((), dtype=weight.dtype, device=weight.device).expand(1, 3, patch, patch * size)
    type(embeddings).forward(probe, pixels, torch.ones(1, 1, size, dtype=torch.bool, device=weight.device))
    return table.ids[0].cpu()


def takes_sizes(vpm: Any) -> bool:
    """Return True if a vision transformer takes the sizes of slices: with 2.5 a slice is one long row of patches."""
    takes = signature(vpm.forward).parameters
    if "tgt_sizes" not in takes and "patch_attention_mask" not in takes:
        raise SpecError(
            f"the forward of {type(vpm).__name__} takes {[*takes]}: expected tgt_sizes, or patch_attention_mask for "
            "MiniCPM-V 2.5; pass model.vpm itself, not a wrapper of it"
        )
    return "tgt_sizes" in takes
