"""Towers that take the patches of images and videos of any size, one after another."""

import torch
from torch import nn
from torch.nn.functional import interpolate

import varlen_graphs as vg
from tests.support.declared.case import Case, alone, graphed
from tests.support.prefixed import expected as with_prefix
from tests.support.prefixed import prefixed

BUDGETS = [vg.budgets.Budget(64, items=4, segments=16), vg.budgets.Budget(192, items=8, segments=32)]
SIZES = [[(4, 6), (2, 2), (8, 4)], [(2, 4)], [(6, 6)] * 5]
ATTENTION = [vg.buffers.CuSeqlens(), vg.buffers.MaxSeqlen()]


class Attending(nn.Module):
    """Attention within segments, with what else a tower has before and after it."""

    def __init__(self, dim=32, heads=2, queries=0):
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(dim, 3 * dim)
        self.table, self.queries = nn.Parameter(torch.randn(25, dim)), nn.Parameter(torch.randn(max(1, queries), dim))
        self.inv_freq = nn.Buffer(10_000 ** -(torch.arange(dim // heads // 4) / (dim // heads // 4)))

    def attend(self, x, cu_seqlens, max_seqlen, rotary=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        if rotary is not None:
            q, k = vg.kernels.apply_rotary(q, k, *rotary)
        return x + vg.varlen_attention(q, k, v, cu_seqlens, max_seqlen).flatten(1)


def calls(sizes=SIZES, name="sizes"):
    return [
        {"x": torch.randn(sum(t * h * w for *_, t, h, w in [(1, *s) for s in own]), 32), name: own} for own in sizes
    ]


def rotary(device):
    class Tower(Attending):
        def forward(self, x, rotary, cu_seqlens, max_seqlen):
            return self.attend(x, cu_seqlens, max_seqlen, rotary)

    spec = vg.BufferSpec(
        "x", vg.layouts.GridHW("sizes"), [vg.buffers.RotaryTable("rotary", inv_freq="inv_freq"), *ATTENTION]
    )
    encoder = graphed(Tower(), BUDGETS, spec, device)
    return Case(encoder, calls(), alone(encoder, "x", ["sizes"]))


def resampled(device):
    class Tower(Attending):
        def forward(self, x, pos):
            return x + pos

    spec = vg.BufferSpec(
        "x", vg.layouts.GridHW("sizes"), [vg.buffers.Interpolation("pos", table="table", align_corners=False)]
    )
    module = Tower()

    def run(x, sizes):
        grid = module.table.view(1, 5, 5, -1).movedim(-1, 1)
        each = [interpolate(grid, size, mode="bilinear").flatten(2)[0].mT for size in sizes]
        return x + torch.cat(each)

    return Case(graphed(module, BUDGETS, spec, device), calls(), run)


def class_token(device):
    encoder = prefixed(backend="tape" if device == "cpu" else "cuda")
    encoder.module.to(device)
    some = [{"x": torch.randn(sum(h * w for h, w in own), 8), "sizes": own} for own in SIZES]
    return Case(encoder, some, lambda x, sizes: with_prefix(encoder.module, x, sizes))


def windows(device):
    class Tower(Attending):
        def forward(self, x, window_index, reverse_indices, cu_seqlens, max_seqlen):
            x = x.unflatten(0, (-1, 4))[window_index].flatten(0, 1)
            return self.attend(x, cu_seqlens, max_seqlen).unflatten(0, (-1, 4))[reverse_indices].flatten(0, 1)

    per = vg.layouts.Windows(2)
    index, back = (
        vg.buffers.WindowIndex(per, name, inverse=name[0] == "r") for name in ("window_index", "reverse_indices")
    )
    spec = vg.BufferSpec(
        "x",
        vg.GridTHW("grid_thw", merge=2),
        [index, back, vg.buffers.CuSeqlens(per=per), vg.buffers.MaxSeqlen(per=per)],
    )
    encoder = graphed(Tower(), BUDGETS, spec, device)
    grids = [[(1, 4, 6), (2, 2, 4)], [(1, 2, 2)], [(3, 6, 6)]]
    return Case(encoder, calls(grids, "grid_thw"), alone(encoder, "x", ["grid_thw"]))


def merged(device):
    class Tower(Attending):
        def forward(self, x, cu_seqlens, max_seqlen):
            return self.attend(x, cu_seqlens, max_seqlen).unflatten(0, (-1, 4)).flatten(1)

    frames = [vg.buffers.CuSeqlens(per="frame"), vg.buffers.MaxSeqlen(per="frame")]
    spec = vg.BufferSpec("x", vg.GridTHW("grid_thw", merge=2), frames, vg.outputs.Rows(every=4))
    encoder = graphed(Tower(), BUDGETS, spec, device)
    grids = [[(1, 4, 6), (3, 2, 4)], [(1, 2, 2)], [(4, 6, 6)]]
    return Case(encoder, calls(grids, "grid_thw"), alone(encoder, "x", ["grid_thw"]))


def learned_queries(device):
    class Tower(Attending):
        def forward(self, x, cu_queries, cu_seqlens, max_seqlen, items):
            _, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
            q = self.queries.unflatten(-1, (self.heads, -1)).repeat(items, 1, 1)
            return vg.varlen_attention(
                q, k, v, cu_queries, 3, cu_seqlens_k=cu_seqlens, max_seqlen_k=max_seqlen
            ).flatten(1)

    queries = vg.buffers.CuSeqlens("cu_queries", queries=3)
    number = vg.buffers.DeviceBuffer("items", lambda table: table.budget.items, any_segments=False)
    spec = vg.BufferSpec("x", vg.layouts.GridHW("sizes"), [queries, number, *ATTENTION], vg.outputs.Items(rows=3))
    encoder = graphed(Tower(queries=3), BUDGETS, spec, device)
    return Case(encoder, calls(), alone(encoder, "x", ["sizes"]))


def of_sizes(device):
    class Tower(Attending):
        def forward(self, x, cu_seqlens, max_seqlen):
            return self.attend(x.flatten(1), cu_seqlens, max_seqlen)

    rows = vg.inputs.Rows("x", (2, 4, 4))
    encoder = graphed(
        Tower(), BUDGETS, vg.BufferSpec(rows, vg.layouts.PictureSizes("sizes", patch=4), ATTENTION), device
    )

    def run(x, sizes):
        out = x.new_zeros(len(x), x.shape[2] // 4, x.shape[3] // 4, 32)
        for own, picture, (h, w) in zip(out, x, sizes, strict=True):
            own[: h // 4, : w // 4] = encoder.eager(picture[None, :, :h, :w], [(h, w)]).unflatten(1, (h // 4, w // 4))[
                0
            ]
        return out.flatten(1, 2)

    def call(sizes):
        height, width = map(max, zip(*sizes, strict=True))
        return {"x": torch.randn(len(sizes), 2, 4 * height, 4 * width), "sizes": [(4 * h, 4 * w) for h, w in sizes]}

    return Case(encoder, [call(sizes) for sizes in SIZES], run)


PACKED_IMAGES = {
    "images padded to one size (Pixtral)": of_sizes,
    "images of any size, rotary positions (Qwen-VL)": rotary,
    "resampled position embeddings (SigLIP 2)": resampled,
    "class tokens and registers (packed DINOv2)": class_token,
    "window attention (Qwen2.5-VL)": windows,
    "videos with patches merged 2 x 2 (Qwen-VL)": merged,
    "learned queries (resamplers)": learned_queries,
}
