"""A module that is called with padded batches and a mask, and computes packed rows inside its graphs."""

import torch

import varlen_graphs as vg


class Documents(torch.nn.Module):
    def __init__(self, dim=64, heads=4):
        super().__init__()
        self.heads, self.qkv = heads, torch.nn.Linear(dim, 3 * dim)

    def forward(self, x, attention_mask):  # as it is called
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = attention_mask.bool()[:, None, None]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2)


def packed(module, x, cu_seqlens, max_seqlen):  # as it is captured
    q, k, v = module.qkv(x).unflatten(-1, (3, module.heads, -1)).unbind(1)
    return vg.varlen_attention(q, k, v, cu_seqlens, max_seqlen).flatten(1)


spec = vg.BufferSpec(
    rows=vg.inputs.Rows("x", shape=(64,)),
    layout=vg.Mask("attention_mask", packed=True),
    buffers=[vg.buffers.CuSeqlens(), vg.buffers.MaxSeqlen()],
)

if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = "cuda" if device == "cuda" else "tape"
    torch.manual_seed(0)
    module = Documents().to(device).eval()
    encoder = vg.GraphedEncoder(module, [256, 512], spec, forward=packed, backend=backend)
    x, lengths = torch.randn(3, 1000, 64, device=device), torch.tensor([20, 150, 7])
    attention_mask = (torch.arange(1000) < lengths[:, None]).to(device)
    with torch.no_grad():
        out, eager = encoder(x, attention_mask), module(x, attention_mask) * attention_mask[..., None]
    assert encoder.stats.replays == {encoder.budgets[0]: 1}  # 256 rows for 177, where the batch has 3000
    print("largest difference from eager:", (out - eager).abs().max().item())
