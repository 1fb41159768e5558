"""A DiT whose images have any size, a timestep and a class each: tensors beside the rows."""

import torch

import varlen_graphs as vg


class Block(torch.nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.modulation = heads, torch.nn.Linear(dim, 3 * dim)
        self.norm = torch.nn.LayerNorm(dim, elementwise_affine=False)
        self.qkv, self.proj = torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)

    def forward(self, x, condition, rotary, cu_seqlens, max_seqlen):
        shift, scale, gate = self.modulation(condition).chunk(3, -1)
        q, k, v = self.qkv(self.norm(x) * (1 + scale) + shift).unflatten(-1, (3, self.heads, -1)).unbind(1)
        q, k = vg.kernels.apply_rotary(q, k, *rotary)
        return x + gate * self.proj(vg.varlen_attention(q, k, v, cu_seqlens, max_seqlen).flatten(1))


class DiT(torch.nn.Module):
    def __init__(self, dim=64, heads=4, depth=2):
        super().__init__()
        self.embed, self.out = torch.nn.Linear(16, dim), torch.nn.Linear(dim, 16)
        self.time, self.classes = torch.nn.Linear(16, dim), torch.nn.Embedding(10, dim)
        self.blocks = torch.nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.inv_freq = torch.nn.Buffer(10_000 ** -(torch.arange(dim // heads // 4) / (dim // heads // 4)))

    def forward(self, latents, timestep, label, rotary, cu_seqlens, max_seqlen):
        angles = timestep[:, None] * 2.0 ** -torch.arange(8, device=timestep.device)
        waves = torch.cat([angles.cos(), angles.sin()], -1).to(latents.dtype)
        condition = self.time(waves) + self.classes(label)
        x = self.embed(latents)
        for block in self.blocks:
            x = block(x, condition, rotary, cu_seqlens, max_seqlen)
        return self.out(x)


spec = vg.BufferSpec(
    rows=vg.inputs.Rows("latents", shape=(16,)),
    layout=vg.layouts.GridHW("sizes"),
    inputs=[  # timesteps stay float32 in a model of 16 bits, which would round them
        vg.inputs.PerItem("timestep", dtype=torch.float32, per_row=True),
        vg.inputs.PerItem("label", dtype=torch.int64, per_row=True),
    ],
    buffers=[vg.buffers.RotaryTable("rotary", inv_freq="inv_freq"), vg.buffers.CuSeqlens(), vg.buffers.MaxSeqlen()],
)

if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    encoder = vg.GraphedEncoder(
        DiT().to(device).eval(), vg.Ladder(256, 1024, 2), spec, backend="cuda" if device == "cuda" else "tape"
    )
    latents, sizes = torch.randn(8 * 12 + 16 * 16, 16, device=device), [(8, 12), (16, 16)]
    conditions = {"timestep": [999.0, 250.5], "label": [3, 7]}
    out, eager = (run(latents, sizes=sizes, **conditions) for run in (encoder, encoder.eager))
    print("largest difference from eager:", (out - eager).abs().max().item())
