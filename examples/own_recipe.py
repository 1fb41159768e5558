"""A recipe of your own: a tower whose forward reads its grid on the host, graphed inside a model by one line."""

import torch
from torch import nn

import varlen_graphs as vg


class Tower(nn.Module):
    """Someone's encoder: patches in, one vector for each 2 x 2 of them out."""

    def __init__(self, dim=32, heads=2):
        super().__init__()
        self.heads = heads
        self.embed = nn.Linear(48, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.merger = nn.Linear(4 * dim, dim)

    def forward(self, pixels, grid_thw):
        x = self.embed(pixels)
        outputs, start = [], 0
        for t, h, w in grid_thw.tolist():  # the host reads the grid: no graph can hold this
            q, k, v = self.qkv(x[start : start + t * h * w]).view(1, -1, 3, self.heads, 16).permute(2, 0, 3, 1, 4)
            outputs.append(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)[0])
            start += t * h * w
        return self.merger(torch.cat(outputs).view(-1, 4 * x.shape[1]))


@vg.recipes.register("Tower")
def tower_recipe(tower, budgets=None, **options):
    def forward(tower, pixels, cu_seqlens, max_seqlen):  # the same, for all items at once
        q, k, v = tower.qkv(tower.embed(pixels)).view(-1, 3, tower.heads, 16).unbind(1)
        out = vg.varlen_attention(q, k, v, cu_seqlens, max_seqlen)
        return tower.merger(out.reshape(-1, tower.merger.in_features))

    spec = vg.BufferSpec(
        rows=vg.inputs.Rows("pixels", shape=(48,)),
        layout=vg.GridTHW("grid_thw", merge=2),
        buffers=[vg.buffers.CuSeqlens(per="clip"), vg.buffers.MaxSeqlen(per="clip")],
        outputs=vg.outputs.Rows(every=4),
    )
    return vg.GraphedEncoder(tower, budgets or vg.Ladder(), spec, forward=forward, **options)


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.ModuleDict({"vision": Tower(), "head": nn.Linear(32, 10)}).to(device).eval()
    pixels, grid_thw = torch.randn(52, 48, device=device), torch.tensor([[1, 4, 6], [1, 4, 4], [3, 2, 2]])
    with torch.no_grad():
        expected = model["vision"](pixels, grid_thw)
    vg.wrap(model, budgets=[64, 128], backend="cuda" if device == "cuda" else "tape")
    print("largest difference from eager:", (model["vision"](pixels, grid_thw) - expected).abs().max().item())
