"""MiniCPM-V 2.5, 2.6, 4.0 and 4.5: vision transformer and resampler in one graph, no slice padded to another.

Follows the modules that come with the weights, by the names of their parts: `vpm` (`SiglipVisionTransformer` in
`modeling_navit_siglip.py`; of 2.5 `Idefics2VisionTransformer` of transformers, which is the same but for positions) and
`resampler`. These take slices `[3, patch, patch * patches]`, padded to a batch; here the patches of all slices are
rows, which `pack_slices` makes of them.
"""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from varlen_graphs.attention.api import TileSchedule, varlen_attention
from varlen_graphs.attention.backends import AttentionBackend as Backend
from varlen_graphs.buffers import AttentionSchedule, CuSeqlens, Lookup, MaxSeqlen
from varlen_graphs.buffers.axes import Axis
from varlen_graphs.buffers.sincos import RowEntries
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import InputError, SpecError
from varlen_graphs.layout.budgets import Budgets
from varlen_graphs.recipes.blocks import add_norm, linear_activation, patch_convolution, project_heads
from varlen_graphs.recipes.resampler import (
    Keys,
    check_resampler,
    queries_of,
    resample,
    resampler_buffers,
    slice_budgets,
    slices,
)
from varlen_graphs.recipes.towers import check_parts
from varlen_graphs.spec.buffer_spec import BufferSpec
from varlen_graphs.spec.rows import PackedRows

LARGEST: dict[tuple[Axis, ...], int] = {("h", "w"): 1024, ("row",): 2048}
"""Up to how many patches, along a side or in all, position ids are looked up. Slices have some 1024 in all."""


class MiniCPMVTower(nn.Module):
    """The two modules of a model that see its images."""

    def __init__(self, vpm: nn.Module, resampler: nn.Module) -> None:
        super().__init__()
        self.vpm = vpm
        self.resampler = resampler


def minicpmv(
    vpm: Any, resampler: Any, budgets: Budgets | None = None, *, attention: Backend = "auto", **options: Any
) -> GraphedEncoder:
    """Graph vision transformer and resampler of MiniCPM-V 2.5, 2.6, 4.0 or 4.5 as one encoder.

    The encoder takes `patches` `[rows, 3 * patch * patch]` of all slices one after another (`pack_slices`), and
    `tgt_sizes` `[slices, 2]`, their `(h, w)` in patches. It gives `[slices, queries, dim]`.

    That of 4.5 also takes `temporal_ids`, nested as the processor gives them, one integer a slice: of
    `[[-1], [-1], [2, 6, 9]]` the last three slices are a group, and -1 and `None` are no time. It gives
    `[groups, queries, dim]`. Without `temporal_ids`, or where they are flat, every slice is a group.

    Args:
        vpm: `model.vpm` of a whole model. Where it takes no `tgt_sizes`, as of 2.5, positions are those of one long row
            of patches, as there.
        resampler: `model.resampler`. Where it has temporal positions, it is that of 4.5.
        budgets: As for `GraphedEncoder`, in patches. `None` is `Ladder()` with room for `max(4, rows // 256)` slices.
        attention: The attention backend.
        **options: Further arguments of `GraphedEncoder`.

    Raises:
        SpecError: A module lacks the parts of such a one, or the attention of the resampler is adapted.
    """
    check_parts(vpm, ("embeddings", "encoder", "post_layernorm"), "the vision transformer of MiniCPM-V, model.vpm")
    check_resampler(resampler)
    embeddings, attn = vpm.embeddings, vpm.encoder.layers[0].self_attn
    side = embeddings.num_patches_per_side
    axes = _axes(vpm)

    def forward(
        tower: Any,
        patches: Tensor,
        tgt_sizes: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        schedule: TileSchedule,
        buckets: Tensor,
        cu_queries: Tensor,
        cu_keys: Tensor,
        max_keys: int,
        query_schedule: TileSchedule,
        key_positions: RowEntries,
        key_times: RowEntries | None = None,
    ) -> Tensor:
        embeddings, layers = tower.vpm.embeddings, tower.vpm.encoder.layers
        position = buckets[:, 0]
        if buckets.shape[1] == 2:
            position = position * embeddings.num_patches_per_side + buckets[:, 1]
        x = patch_convolution(patches, embeddings.patch_embedding) + embeddings.position_embedding(position)
        normed = layers[0].layer_norm1(x)
        following = [*(layer.layer_norm1 for layer in layers[1:]), tower.vpm.post_layernorm]
        for layer, next_norm in zip(layers, following, strict=True):
            attn = layer.self_attn
            q, k, v = project_heads(normed, (attn.q_proj, attn.k_proj, attn.v_proj), attn.num_heads, attn.head_dim)
            attended = varlen_attention(q, k, v, cu_seqlens, max_seqlen, schedule=schedule, backend=attention)
            change = attn.out_proj(rearrange(attended, "rows heads dim -> rows (heads dim)"))
            x, normed = add_norm(x, change, layer.layer_norm2)
            change = layer.mlp.fc2(linear_activation(normed, layer.mlp.fc1, layer.mlp.activation_fn))
            x, normed = add_norm(x, change, next_norm)
        keys = Keys(len(tgt_sizes), cu_queries, cu_keys, max_keys, query_schedule, key_positions, key_times)
        return resample(tower.resampler, normed, keys, attention)

    spec = BufferSpec(
        rows=PackedRows("patches", shape=(embeddings.patch_embedding.weight[0].numel(),)),
        layout=slices(resampler),
        buffers=[
            CuSeqlens(per="item"),
            MaxSeqlen(per="item"),
            AttentionSchedule(attn.num_heads, attn.head_dim, per="item"),
            Lookup("buckets", lambda size: position_buckets(size, side), axes=axes, largest=LARGEST[axes]),
            *resampler_buffers(resampler),
        ],
        outputs=queries_of(resampler),
    )
    tower = MiniCPMVTower(vpm, resampler)
    return GraphedEncoder(tower, slice_budgets() if budgets is None else budgets, spec, forward=forward, **options)


def pack_slices(slices: Sequence[Tensor]) -> Tensor:
    """Slices as the processor gives them, `[3, patch, patch * patches]` each, as rows `[patches, 3 * patch * patch]`.

    Raises:
        InputError: There are none, or they are not of such shapes.
    """
    patch = slices[0].shape[1] if len(slices) and slices[0].dim() == 3 else 0
    for index, one in enumerate(slices):
        if one.dim() != 3 or one.shape[:2] != slices[0].shape[:2] or patch == 0 or one.shape[2] % patch:
            raise InputError(
                f"slices[{index}] is {list(one.shape)}: expected [3, patch, patch * patches], of one patch size"
            )
    if not patch:
        raise InputError("slices is empty: expected at least one; skip the call when there is nothing to encode")
    rows = [rearrange(one, "c i (patches j) -> patches (c i j)", j=patch) for one in slices]
    return torch.cat(rows)


def position_buckets(size: int, side: int) -> Tensor:
    """Which of `side` positions each patch along a side of `size` patches has, int64 `[size]` on the CPU.

    By the expressions of the original, whose rounding no other way repeats: 25 patches, say, would get other positions.
    In float32, its default dtype.
    """
    step = (1 / torch.tensor(size, dtype=torch.float32, device="cpu")).item()
    boundaries = torch.arange(1 / side, 1.0, 1 / side, dtype=torch.float32, device="cpu")
    coordinates = torch.arange(0, 1 - 1e-6, step, dtype=torch.float32, device="cpu")
    return torch.bucketize(coordinates, boundaries, right=True)


def _axes(vpm: Any) -> tuple[Axis, ...]:
    """Along what patches are counted for position ids: the sides of slices, or one long row."""
    takes = signature(vpm.forward).parameters
    if "tgt_sizes" in takes:
        return ("h", "w")
    if "patch_attention_mask" in takes:
        return ("row",)
    raise SpecError(
        f"{type(vpm).__name__} takes {[*takes]}: expected tgt_sizes among them, or patch_attention_mask without them, "
        "which tells MiniCPM-V 2.5; pass the module itself, not a wrapper of it"
    )
