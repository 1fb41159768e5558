"""Small modules of every kind of declaration, for tests of the encoder."""

import importlib.util
from pathlib import Path

import torch
from torch import nn

import varlen_graphs as vg


def load_example(name):
    """An example of the project, as a module."""
    path = Path(__file__).parent.parent.parent / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Attention(nn.Module):
    """One attention over packed rows: enough to mix the rows of a segment, and no others."""

    def __init__(self, dim=8):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x, cu_seqlens, max_seqlen, scale=1.0):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(1)
        return x + scale * vg.varlen_attention(q, k, v, cu_seqlens, max_seqlen).flatten(1)


def attention_spec(**changes):
    return vg.BufferSpec(
        **({"rows": "x", "layout": vg.Lengths(), "buffers": [vg.CuSeqlens(), vg.MaxSeqlen()]} | changes)
    )


BUDGETS = (vg.Budget(64, items=4), vg.Budget(128, items=8))


def attention_encoder(budgets=BUDGETS, module=None, spec=None, **options):
    return vg.GraphedEncoder(
        Attention() if module is None else module, budgets, spec or attention_spec(), **({"backend": "tape"} | options)
    )
