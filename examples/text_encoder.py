"""Run a small packed text encoder as CUDA graphs, or on the tape if there is no GPU."""

import torch
from torch import nn

import varlen_graphs as vg


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, cu_seqlens, max_seqlen):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(1)
        x = x + self.proj(vg.varlen_attention(q, k, v, cu_seqlens, max_seqlen).flatten(1))
        return x + self.mlp(self.norm2(x))


class TextEncoder(nn.Module):
    """Encodes the concatenated tokens of all documents."""

    def __init__(self, vocabulary=1000, longest=512, dim=128, heads=4, depth=3):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(longest, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))

    def forward(self, input_ids, position_ids, cu_seqlens, max_seqlen, first_rows):
        x = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x, cu_seqlens, max_seqlen)
        return {"tokens": x, "pooled": x[first_rows]}


def graph(encoder, **options):
    spec = vg.BufferSpec(
        rows=vg.inputs.Rows("input_ids", shape=(), dtype=torch.int64),
        layout=vg.Lengths("lengths"),
        buffers=[
            vg.buffers.RowPositions("position_ids"),
            vg.buffers.CuSeqlens("cu_seqlens", per="item"),
            vg.buffers.MaxSeqlen("max_seqlen", per="item"),
            vg.buffers.DeviceBuffer("first_rows", lambda table: table.item_starts.clamp(max=table.budget.rows - 1)),
        ],
        outputs=vg.outputs.Fields(tokens=vg.outputs.Rows(), pooled=vg.outputs.Items()),
    )
    budgets = [vg.budgets.Budget(rows, items=rows // 16, max_seqlen=512) for rows in (512, 1024, 2048)]
    return vg.GraphedEncoder(encoder, budgets, spec, **options)


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    encoder = TextEncoder().to(device).eval()
    graphed = graph(encoder, backend="cuda" if device == "cuda" else "tape")
    lengths = [17, 230, 5, 101]
    input_ids = torch.randint(1000, (sum(lengths),), device=device)
    out, eager = graphed(input_ids, lengths=lengths), graphed.eager(input_ids, lengths=lengths)
    print({name: list(tensor.shape) for name, tensor in out.items()}, graphed)
    print("largest difference from eager:", max((out[name] - eager[name]).abs().max().item() for name in out))
