"""The encoder of the documentation: one layer of attention over packed rows, and its declaration."""

import torch

import varlen_graphs as vg


class Encoder(torch.nn.Module):
    def __init__(self, dim=64, heads=4):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)

    def forward(self, x, cu_seqlens, max_seqlen):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        return x + self.proj(vg.varlen_attention(q, k, v, cu_seqlens, max_seqlen).flatten(1))


spec = vg.BufferSpec(
    rows=vg.inputs.Rows("x", shape=(64,)),  # the packed rows, and the shape of one row
    layout=vg.Lengths("lengths"),  # the items of a call: their lengths
    buffers=[vg.buffers.CuSeqlens(), vg.buffers.MaxSeqlen()],  # computed from the items, inside the graph
    outputs=vg.outputs.Rows(),  # one output row for each input row
)


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = "cuda" if device == "cuda" else "tape"
    encoder = vg.GraphedEncoder(Encoder().to(device).eval(), [256, 512], spec, backend=backend)
    rows, lengths = torch.randn(252, 64, device=device), [17, 230, 5]
    out, eager = encoder(rows, lengths=lengths), encoder.eager(rows, lengths=lengths)
    print(list(out.shape), encoder)
    print("largest difference from eager:", (out - eager).abs().max().item())
