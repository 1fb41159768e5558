"""An encoder of images whose layers attend within windows and across frames, as those of Qwen2.5-VL do."""

import torch

import varlen_graphs as vg


class Windowed(torch.nn.Module):
    def __init__(self, dim=64, heads=4):
        super().__init__()
        self.heads, self.inv_freq = heads, torch.nn.Buffer(10_000 ** -(torch.arange(4) / 4))
        self.within, self.across = (torch.nn.Linear(dim, 3 * dim) for _ in range(2))

    def forward(self, x, window_index, reverse_indices, rotary, cu_seqlens, max_seqlen, cu_windows, max_window):
        x = x.unflatten(0, (-1, 4))[window_index].flatten(0, 1)  # into window order, four rows a merged token
        for qkv, segments, longest in (
            (self.within, cu_windows, max_window),
            (self.across, cu_seqlens, max_seqlen),
        ):
            q, k, v = qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
            q, k = vg.kernels.apply_rotary(q, k, *rotary)
            x = x + vg.varlen_attention(q, k, v, segments, longest).flatten(1)
        return x.unflatten(0, (-1, 4))[reverse_indices].flatten(0, 1)


windows = vg.layouts.Windows(2)
spec = vg.BufferSpec(
    rows="x",
    layout=vg.GridTHW("grid_thw", merge=2),
    buffers=[
        vg.buffers.WindowIndex(windows),
        vg.buffers.WindowIndex(windows, "reverse_indices", inverse=True),
        vg.buffers.RotaryTable("rotary", inv_freq="inv_freq", order=windows),
        vg.buffers.CuSeqlens("cu_seqlens", per="frame"),
        vg.buffers.MaxSeqlen("max_seqlen", per="frame"),
        vg.buffers.CuSeqlens("cu_windows", per=windows),
        vg.buffers.MaxSeqlen("max_window", per=windows),
    ],
)

if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = "cuda" if device == "cuda" else "tape"
    torch.manual_seed(0)
    encoder = vg.GraphedEncoder(
        Windowed().to(device).eval(), [vg.budgets.Budget(256, segments=32)], spec, backend=backend
    )
    x, grid_thw = torch.randn(6 * 10 + 2 * 4 * 4, 64, device=device), [(1, 6, 10), (2, 4, 4)]
    out, eager = encoder(x, grid_thw=grid_thw), encoder.eager(x, grid_thw=grid_thw)
    print("largest difference from eager:", (out - eager).abs().max().item())
