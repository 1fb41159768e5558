"""Declarations that the doctor writes, pasted: what a module computes by itself, recognised by its values."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import varlen_graphs as vg

GRIDS = [[(1, 4, 4), (1, 8, 6)], [(1, 8, 6), (1, 4, 4)], [(1, 8, 8)], [(2, 4, 4), (1, 4, 8)]]
LENGTHS = [[5, 11], [11, 5], [16], [4, 4, 8]]


def pasted(module, calls):
    """Return the declaration that the doctor writes for a module."""
    summary = vg.diagnose(module, *calls).summary
    code = summary[summary.index("vg.BufferSpec(") :]
    assert "..." not in code, code
    return eval(re.sub(r"  # .*", "", code), {"vg": vg, "torch": torch}), code


def check(module, calls, declared, budgets=(64, 128)):
    """Check that a declaration, pasted, gives what the module gives, with `declared` as its forward."""
    spec, code = pasted(module, calls)
    encoder = vg.GraphedEncoder(module, [*budgets], spec, forward=declared, backend="tape")
    for call in [*calls, *calls]:
        expected = module(**call)
        torch.testing.assert_close(encoder(**call), expected, atol=1e-4, rtol=1e-4)
        encoder.poison()
    assert not encoder.stats.eager
    assert encoder.stats.replays.total() == 2 * len(calls)
    return code


def blocks(x):
    """Return a grid `[h, w]` in the order of merge blocks."""
    h, w = x.shape
    return x.reshape(h // 2, 2, w // 2, 2).transpose(1, 2).flatten()


class Tower(nn.Module):
    """A plain vision transformer with a merger, as people write one: it asks the host for each image."""

    def __init__(self, mode="bilinear", dim=16):
        super().__init__()
        self.mode = mode
        self.embed, self.qkv, self.proj = nn.Linear(12, dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.merger = nn.Linear(4 * dim, 6)
        self.table = nn.Parameter(torch.randn(64, dim))
        self.register_buffer("frequencies", 100 ** -(torch.arange(2) / 2))

    def embeddings(self, grid):
        table, found = self.table.T.reshape(1, -1, 8, 8), []
        for t, h, w in grid.tolist():
            own = functional.interpolate(table, size=(h, w), mode=self.mode)[0].flatten(1).T
            order = blocks(torch.arange(h * w).view(h, w))
            found.append(own[order].repeat(t, 1))
        return torch.cat(found)

    def rotation(self, grid):
        found = []
        for t, h, w in grid.tolist():
            y, x = torch.arange(h)[:, None].expand(h, w), torch.arange(w).expand(h, w)
            found.append(torch.stack([blocks(y), blocks(x)], 1).repeat(t, 1))
        angles = (torch.cat(found)[..., None] * self.frequencies).flatten(1)
        return torch.cat([angles, angles], 1).cos(), torch.cat([angles, angles], 1).sin()

    def run(self, x, rotation, cu_seqlens, max_seqlen):
        q, k, v = self.qkv(x).unflatten(1, (3, 2, 8)).unbind(1)
        q, k = vg.kernels.apply_rotary(q, k, *rotation)
        x = x + self.proj(vg.varlen_attention(q, k, v, cu_seqlens, max_seqlen).flatten(1))
        return self.merger(x.reshape(-1, 64))

    def forward(self, pixels, grid_thw):
        frames = torch.repeat_interleave(grid_thw[:, 1] * grid_thw[:, 2], grid_thw[:, 0])
        cu_seqlens = functional.pad(frames.cumsum(0, dtype=torch.int32), (1, 0))
        x = self.embed(pixels) + self.embeddings(grid_thw)
        return self.run(x, self.rotation(grid_thw), cu_seqlens, int(frames.max()))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@torch.no_grad()
def test_a_vision_transformer_with_a_merger(mode):
    torch.manual_seed(0)
    calls = [{"pixels": torch.randn(sum(t * h * w for t, h, w in g), 12), "grid_thw": torch.tensor(g)} for g in GRIDS]

    def declared(tower, pixels, cu_seqlens, max_seqlen, pos_embeds, position_embeddings):
        return tower.run(tower.embed(pixels) + pos_embeds, position_embeddings, cu_seqlens, max_seqlen)

    code = check(Tower(mode).eval(), calls, declared)
    assert 'layout=vg.GridTHW("grid_thw", merge=2)' in code
    assert "outputs=vg.outputs.Rows(every=4)" in code
    assert 'vg.buffers.RotaryTable(inv_freq="frequencies", order="merge_block")' in code
    assert (mode == "bicubic") == ('mode="bicubic"' in code)


class Windowed(nn.Module):
    """Attention within windows of 2 x 2 merged tokens, in an order that the host computes."""

    def __init__(self, dim=16):
        super().__init__()
        self.embed, self.qkv, self.merger = nn.Linear(12, dim), nn.Linear(dim, 3 * dim), nn.Linear(4 * dim, 6)

    def windows(self, grid):
        order, sizes, start = [], [], 0
        for t, h, w in grid.tolist():
            h, w = h // 2, w // 2
            for _ in range(t):
                index = start + torch.arange(h * w).view(h, w)
                for y in range(0, h, 2):
                    for x in range(0, w, 2):
                        window = index[y : y + 2, x : x + 2].flatten()
                        order.append(window)
                        sizes.append(4 * len(window))
                start += h * w
        return torch.cat(order), torch.tensor([0, *sizes]).cumsum(0, dtype=torch.int32), max(sizes)

    def run(self, pixels, order, cu_seqlens, max_seqlen):
        x = self.embed(pixels).unflatten(0, (-1, 4))[order].flatten(0, 1)
        q, k, v = self.qkv(x).unflatten(1, (3, 2, 8)).unbind(1)
        x = vg.varlen_attention(q, k, v, cu_seqlens, max_seqlen).flatten(1)
        return self.merger(x.reshape(-1, 64))

    def forward(self, pixels, grid_thw):
        return self.run(pixels, *self.windows(grid_thw))


@torch.no_grad()
def test_attention_in_windows():
    torch.manual_seed(0)
    grids = [*GRIDS[:3], [(2, 4, 4), (1, 8, 4)], [(1, 6, 10)]]
    calls = [{"pixels": torch.randn(sum(t * h * w for t, h, w in g), 12), "grid_thw": torch.tensor(g)} for g in grids]

    def declared(tower, pixels, window_index, cu_window_seqlens, max_window_seqlen):
        return tower.run(pixels, window_index, cu_window_seqlens, max_window_seqlen)

    code = check(Windowed().eval(), calls, declared)
    assert "vg.buffers.WindowIndex(windows=vg.layouts.Windows(2))" in code


class Lines(nn.Module):
    """Packed sequences with learned positions, an integer each, and a scale for the whole call; pooled."""

    def __init__(self, dim=16):
        super().__init__()
        self.positions, self.languages = nn.Embedding(32, dim), nn.Embedding(5, dim)
        self.qkv = nn.Linear(dim, 3 * dim)

    def run(self, x, positions, cu_seqlens, max_seqlen, language, types, scale):
        x = x * scale + self.positions(positions) + types
        q, k, v = self.qkv(x).unflatten(1, (3, 2, 8)).unbind(1)
        x = vg.varlen_attention(q, k, v, cu_seqlens, max_seqlen).flatten(1)
        starts = cu_seqlens[: len(language)].long().clamp(max=len(x) - 1)
        return {"rows": x, "pooled": x[starts] + self.languages(language)}

    def forward(self, x, lengths, language, types, scale):
        positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
        cu_seqlens = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return self.run(x, positions, cu_seqlens, lengths.max().item(), language, types, scale)


@torch.no_grad()
def test_sequences_with_tensors_beside_them():
    torch.manual_seed(0)
    calls = [
        {
            "x": torch.randn(16, 16), "lengths": torch.tensor(own), "language": torch.randint(5, (len(own),)),
            "types": torch.randn(16, 1), "scale": torch.randn(1, 16),
        }
        for own in LENGTHS
    ]  # fmt: skip

    def declared(module, x, cu_seqlens, max_seqlen, position_ids, language, types, scale):
        return module.run(x, position_ids, cu_seqlens, max_seqlen, language, types, scale)

    code = check(Lines().eval(), calls, declared)
    assert 'vg.inputs.PerItem("language", dtype=torch.int64)' in code
    assert 'vg.inputs.PerRow("types", shape=(1,))' in code
    assert 'vg.inputs.PerCall("scale", shape=(1, 16))' in code
    assert "outputs=vg.outputs.Fields(rows=vg.outputs.Rows(), pooled=vg.outputs.Items())" in code


class Texts(nn.Module):
    """A padded batch, with a mask for attention that the host shapes."""

    def __init__(self, causal):
        super().__init__()
        self.causal, self.qkv = causal, nn.Linear(16, 48)

    def run(self, x, mask, types):
        q, k, v = (self.qkv(x) + types).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)

    def forward(self, x, attention_mask, types):
        batch, length = attention_mask.shape
        mask = torch.eye(length, dtype=torch.bool).repeat(batch, 1, 1)
        for item, count in enumerate(attention_mask.sum(1).tolist()):
            mask[item, :count, :count] = True
        mask = mask.tril() if self.causal else mask
        return self.run(x, mask[:, None], types) * attention_mask[..., None]


@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_padded_texts(causal):
    torch.manual_seed(0)
    masks = [(torch.arange(8) < torch.tensor(own)[:, None]).long() for own in ([8, 5], [3, 8], [8, 8])]
    calls = [{"x": torch.randn(2, 8, 16), "attention_mask": mask, "types": torch.randn(2, 8, 1)} for mask in masks]

    def declared(module, x, mask, types):
        return module.run(x, mask, types)

    code = check(Texts(causal).eval(), calls, declared, [vg.budgets.Budget.padded(3, 16)])
    assert 'layout=vg.Mask("attention_mask")' in code
    assert ("causal=True" in code) == causal
    assert 'inputs=[vg.inputs.PerRow("types", shape=(1,))]' in code


@torch.no_grad()
def test_a_call_of_other_items_than_its_rows_is_told_by_words():
    class Odd(nn.Module):
        def forward(self, x, counts):
            return x[: int(counts.max())]

    summary = vg.diagnose(Odd(), {"x": torch.randn(9, 4), "counts": torch.tensor([1, 2])}).summary
    assert "...,  # MaxSeqlen" in summary


@torch.no_grad()
def test_what_is_not_recognised_stays_to_be_replaced():
    class Reversed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(32, 16)

        def forward(self, x, lengths):
            position_ids = torch.cat([torch.arange(n).flip(0) for n in lengths.tolist()])
            cu_seqlens = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
            q = (x + self.table(position_ids)).unflatten(1, (2, 8))
            return vg.varlen_attention(q, q, q, cu_seqlens, lengths.max().item()).flatten(1)

    calls = [(torch.randn(16, 16), torch.tensor(own)) for own in LENGTHS]  # by position
    summary = vg.diagnose(Reversed().eval(), *calls).summary
    assert "vg.buffers.CuSeqlens(),\n" in summary
    assert "vg.buffers.MaxSeqlen(),\n" in summary
    assert "...,  # GridPositions (of grids) or RowPositions (of lengths)" in summary


@torch.no_grad()
def test_a_table_may_be_a_buffer_of_any_dtype():
    torch.manual_seed(0)
    tower = Tower().eval()
    table = tower.table.detach()
    del tower.table
    tower.register_buffer("table", table)
    tower.bfloat16()
    calls = [{"pixels": torch.randn(64, 12).bfloat16(), "grid_thw": torch.tensor(g)} for g in ([(1, 8, 8)], GRIDS[0])]
    assert 'vg.buffers.Interpolation(table="table", order="merge_block"' in pasted(tower, calls)[1]


@torch.no_grad()
def test_an_output_that_may_be_two_things_is_left_open():
    class Pools(nn.Module):
        def forward(self, x, attention_mask):
            return x.mean(1) * attention_mask.sum(1).max().item()

    calls = [{"x": torch.randn(2, 8, 8), "attention_mask": torch.ones(2, 8, dtype=torch.int64)}] * 2
    assert "outputs=...," in vg.diagnose(Pools(), *calls).summary
    calls.append({"x": torch.randn(3, 4, 8), "attention_mask": torch.ones(3, 4, dtype=torch.int64)})
    assert "outputs=vg.outputs.Items()," in vg.diagnose(Pools(), *calls).summary


@torch.no_grad()
def test_a_table_of_zeros_is_not_recognised_in_other_zeros():
    class Zeros(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(16, 8))

        def forward(self, x, grid_thw):
            return x + torch.zeros(len(x), 8) + grid_thw.max().item()

    calls = [{"x": torch.randn(16, 8), "grid_thw": torch.tensor(g)} for g in ([(1, 4, 4)], [(1, 2, 4), (1, 4, 2)])]
    assert "Interpolation" not in vg.diagnose(Zeros().eval(), *calls).summary


def test_calls_without_rows_are_told_by_words_alone():
    class Odd(nn.Module):
        def forward(self, x, lengths):
            return x * lengths.max().item()

    summary = vg.diagnose(Odd(), {"x": torch.randn(0, 8), "lengths": torch.tensor([0, 0])}).summary
    assert "...,  # MaxSeqlen" in summary
