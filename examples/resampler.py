"""A resampler: learned queries that sum up every clip, a group of frames of any size, by two vectors."""

import torch

import varlen_graphs as vg


class Resampler(torch.nn.Module):
    def __init__(self, dim=64, heads=4, queries=2):
        super().__init__()
        self.heads, self.kv = heads, torch.nn.Linear(dim, 2 * dim)
        self.queries = torch.nn.Parameter(torch.randn(queries, heads, dim // heads))

    def forward(self, patches, sizes, cu_queries, cu_keys, max_keys, schedule):
        k, v = self.kv(patches).unflatten(-1, (2, self.heads, -1)).unbind(1)
        queries = self.queries.repeat(len(sizes), 1, 1)  # at most as many groups as items
        out = vg.varlen_attention(
            queries, k, v, cu_queries, 2, cu_seqlens_k=cu_keys, max_seqlen_k=max_keys, schedule=schedule
        )
        return out.flatten(1)


spec = vg.BufferSpec(
    rows="patches",
    layout=vg.layouts.GridHW("sizes", columns=(vg.layouts.NestedColumn("times", pad=-1, default=-1),)),
    buffers=[
        vg.buffers.CuSeqlens("cu_queries", per="group", queries=2),
        vg.buffers.CuSeqlens("cu_keys", per="group"),
        vg.buffers.MaxSeqlen("max_keys", per="group"),
        vg.buffers.AttentionSchedule(heads=4, head_dim=16, per="group", queries=2),
    ],
    outputs=vg.outputs.Groups(rows=2),
)

if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = "cuda" if device == "cuda" else "tape"
    torch.manual_seed(0)
    encoder = vg.GraphedEncoder(Resampler().to(device).eval(), [vg.budgets.Budget(256, items=8)], spec, backend=backend)
    patches = torch.randn(4 * 4 + 3 * 5 + 2 * 2, 64, device=device)
    call = {"patches": patches, "sizes": [(4, 4), (3, 5), (2, 2)], "times": [[0, 1], [0]]}  # two clips
    out, eager = encoder(**call), encoder.eager(**call)
    print(list(out.shape))
    print("largest difference from eager:", (out - eager).abs().max().item())
