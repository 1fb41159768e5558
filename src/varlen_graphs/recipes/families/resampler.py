"""The resampler of MiniCPM-V: learned queries that attend to the patches of a slice or of a group of slices.

Follows `Resampler` in the `resampler.py` that comes with the weights of MiniCPM-V 2.5, 2.6, 4.0 and 4.5, whose
submodules it calls by name. Only that of 4.5 has temporal positions, `max_temporal_size`. It has two forms. This recipe
follows the batched one (`batch_3d_resampler: true`); the other one mixes up slices and patches of a group, and is
refused.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from varlen_graphs.attention.api import TileSchedule, varlen_attention
from varlen_graphs.attention.backends import AttentionBackend
from varlen_graphs.budgets.budget import Budget
from varlen_graphs.budgets.ladder import Budgets, DefaultBudgets, Ladder
from varlen_graphs.buffers import AttentionSchedule, Buffer, CuSeqlens, MaxSeqlen, SinCos, SinCosColumn, add_sincos
from varlen_graphs.buffers.sincos import RowEntries
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import LayoutError, SpecError
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.columns import NestedColumn
from varlen_graphs.layouts.grids import GridHW
from varlen_graphs.layouts.segments import Per
from varlen_graphs.outputs.entries import Extent, Groups, Items
from varlen_graphs.recipes.towers import check_parts

PARTS = ("query", "kv_proj", "attn", "ln_q", "ln_kv", "ln_post", "proj")
ATTENTION_PARTS = ("in_proj_weight", "in_proj_bias", "out_proj", "num_heads", "head_dim")


class Times(NestedColumn):
    """Time of each slice, -1 for none; the nesting groups slices."""

    def parse(self, value: Any, items: int) -> list[int]:
        """Check the values that a call brought and return them, one per slice; none may be below -1."""
        times = super().parse(value, items)
        if min(times) < -1:
            raise LayoutError(f"{self.name} has {min(times)}: expected times of at least 0, or -1 for no time")
        return times


TIMES = Times("temporal_ids", pad=-1, default=-1)


def resampler(
    module: Any, budgets: Budgets | None = None, *, attention: AttentionBackend = "auto", **options: Any
) -> GraphedEncoder:
    """Graph the resampler of MiniCPM-V 2.5, 2.6, 4.0 or 4.5 alone.

    The encoder takes `x` `[rows, vision_dim]`, the concatenated features of all slices, and `tgt_sizes` `[slices, 2]`,
    their `(h, w)` in patches; for 4.5 also `temporal_ids`, as `minicpmv` does. It returns `[slices, queries, dim]`, for
    4.5 `[groups, queries, dim]`.

    Args:
        module: `model.resampler` of a whole model.
        budgets: As for `minicpmv`.
        attention: The attention backend.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: `module` lacks a submodule or attribute of such a resampler, its attention is adapted, or it was
            built with `batch_3d_resampler: false`.
    """
    check_resampler(module)

    def forward(
        module: Any, x: Tensor, tgt_sizes: Tensor, cu_queries: Tensor, cu_keys: Tensor, max_keys: int,
        query_schedule: TileSchedule, key_positions: RowEntries, key_times: RowEntries | None = None,
    ) -> Tensor:  # fmt: skip
        keys = Keys(len(tgt_sizes), cu_queries, cu_keys, max_keys, query_schedule, key_positions, key_times)
        return resample(module, x, keys, attention)

    spec = BufferSpec(
        rows="x" if isinstance(module.kv_proj, nn.Identity) else InputRows("x", shape=(module.kv_proj.in_features,)),
        layout=slices(module),
        buffers=resampler_buffers(module),
        outputs=queries_of(module),
        declared_by="recipe",
    )
    return GraphedEncoder(module, slice_budgets() if budgets is None else budgets, spec, forward=forward, **options)


def check_resampler(module: Any) -> None:
    """Check that a module has the submodules and attributes that `resample` uses, a plain attention, and its form."""
    check_parts(module, PARTS, "the resampler of MiniCPM-V 2.5, 2.6, 4.0 or 4.5, which is model.resampler")
    check_parts(module.attn, ATTENTION_PARTS, "the torch.nn.MultiheadAttention of such a resampler")
    own = module.attn._parameters
    if own.get("in_proj_weight") is None or own.get("in_proj_bias") is None:
        raise SpecError(
            f"the {type(module.attn).__name__} of the resampler has no in_proj weights of its own: expected a plain "
            "attention; merge the adapter into it first"
        )
    if is_temporal(module) and not getattr(module, "batch_infer", True):
        raise SpecError(
            f"the {type(module).__name__} was built with batch_3d_resampler=False, which mixes up slices and patches "
            "of a group: expected the batched form; set model.resampler.batch_infer = True"
        )


def slices(module: Any) -> GridHW:
    """Return the layout argument of a resampler, `tgt_sizes`, with `temporal_ids` for MiniCPM-V 4.5."""
    return GridHW("tgt_sizes", columns=(TIMES,) if is_temporal(module) else ())


def queries_of(module: Any) -> Extent:
    """Return the extent of the output: entries `[queries, dim]` per slice, or per group for MiniCPM-V 4.5."""
    return Groups() if is_temporal(module) else Items()


def slice_budgets() -> DefaultBudgets:
    """Return `Ladder()` with fewer items than by default: every slot computes all queries, even an empty one."""
    return DefaultBudgets([Budget(rows, items=max(4, rows // 256)) for rows in Ladder().row_counts()])


def resampler_buffers(module: Any) -> list[Buffer]:
    """Return the buffers that `resample` takes beside the rows."""
    per: Per = "group" if is_temporal(module) else "item"
    queries, dim = module.query.shape
    attn = module.attn
    buffers: list[Buffer] = [
        CuSeqlens("cu_queries", per=per, queries=queries),
        CuSeqlens("cu_keys", per=per),
        MaxSeqlen("max_keys", per=per),
        AttentionSchedule(attn.num_heads, attn.head_dim, "query_schedule", per=per, queries=queries),
        SinCos("key_positions", _frequencies(dim // 2)),
    ]
    if is_temporal(module):
        buffers.append(SinCosColumn("key_times", "temporal_ids", _frequencies(dim)))
    return buffers


class Keys(NamedTuple):
    """Arguments of `resample` beside the rows, from the buffers of `resampler_buffers`."""

    slots: int  # capacity in slices, or in groups
    cu_queries: Tensor
    cu_keys: Tensor
    max_keys: int
    schedule: TileSchedule
    positions: RowEntries  # of each row in its slice
    times: RowEntries | None  # of the slice of each row; `None` before MiniCPM-V 4.5


def resample(module: Any, x: Tensor, keys: Keys, attention: AttentionBackend) -> Tensor:
    """Resample features `[rows, vision_dim]` to `[slots, queries, dim]`. Slots without keys hold finite values."""
    attn, queries = module.attn, len(module.query)
    v = module.ln_kv(module.kv_proj(x))
    k = add_sincos(v, keys.positions)
    if keys.times is not None:
        k = add_sincos(k, keys.times)
    weights = zip(
        (module.ln_q(module.query), k, v), attn.in_proj_weight.chunk(3), attn.in_proj_bias.chunk(3), strict=True
    )
    q, k, v = (
        rearrange(F.linear(x, weight, bias), "rows (heads dim) -> rows heads dim", heads=attn.num_heads)
        for x, weight, bias in weights
    )
    attended = varlen_attention(
        q.repeat(keys.slots, 1, 1), k, v, keys.cu_queries, queries, cu_seqlens_k=keys.cu_keys,
        max_seqlen_k=keys.max_keys, schedule=keys.schedule, backend=attention,
    )  # fmt: skip
    out = module.ln_post(attn.out_proj(rearrange(attended, "rows heads dim -> rows (heads dim)")))
    out = rearrange(out @ module.proj, "(slots queries) dim -> slots queries dim", queries=queries)
    return cast(Tensor, out)


def _frequencies(dim: int) -> Tensor:
    """Return the frequencies of `dim` channels, float32 `[dim / 2]`; by numpy, as torch would round differently."""
    import numpy

    share = numpy.arange(dim // 2, dtype=numpy.float32) / (dim / 2)
    return torch.from_numpy(1 / 10_000**share)


def is_temporal(module: Any) -> bool:
    """Return True if slices come in groups and have a time each, as for MiniCPM-V 4.5."""
    return hasattr(module, "max_temporal_size")
