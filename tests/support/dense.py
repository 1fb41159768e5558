"""Dense attention over packed rows or padded batches, with masks and biases as arguments."""

import torch
import torch.nn.functional as F
from torch import nn

import varlen_graphs as vg


class DenseAttention(nn.Module):
    """Two layers of attention of torch, `[batch, length, dim]` or `[rows, dim]`, with what is added to their rows.

    Attention multiplies what it masks by 0, so that NaN in a padding row would reach every row.
    """

    def __init__(self, dim=8, heads=2, buckets=32):
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.bias = heads, nn.Embedding(buckets, heads)
        self.layers = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(2))
        self.eval()

    def forward(self, x, mask=None, bias=None, beside=None, of_item=None):
        packed = x.dim() == 2
        x = x if beside is None else x + beside
        x = x if of_item is None else x + of_item
        x = x[None] if packed else x
        mask = mask if bias is None else bias if mask is None else mask + bias
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        return x[0] if packed else x


def dense_encoder(module, buffers, layout=None, budgets=(64, 128), inputs=(), **options):
    """Return an encoder of packed rows of 8 numbers."""
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), layout or vg.Lengths(), buffers, inputs=inputs)
    return vg.GraphedEncoder(module, budgets, spec, **({"backend": "tape"} | options))


def item_by_item(run):
    """Return a function that runs each item of some rows alone."""
    return lambda rows, lengths: torch.cat([run(item) for item in rows.split(lengths)])


LAYOUTS = [[60, 50, 12], [1], [9, 3, 20], [128], [1, 1, 1, 1]]
