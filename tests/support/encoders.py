"""Small encoders, rows for them, and checks of their calls."""

import importlib.util
import threading
from pathlib import Path

import torch
from torch import nn

import varlen_graphs as vg
from tests.support.segments import boundaries
from tests.support.towers import distance


def load_example(name):
    """Import an example of the project."""
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
        self.eval()

    def forward(self, x, cu_seqlens, max_seqlen, scale=1.0):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(1)
        return x + scale * vg.varlen_attention(q, k, v, cu_seqlens, max_seqlen).flatten(1)


class Of(nn.Module):
    """A module of one function, with a weight."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(4))
        self.eval()

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def attention_spec(**changes):
    return vg.BufferSpec(
        **({"rows": "x", "layout": vg.Lengths(), "buffers": [vg.buffers.CuSeqlens(), vg.buffers.MaxSeqlen()]} | changes)
    )


UNVERIFIED = vg.options.Verify(at_capture=False)
"""For modules that the check of new graphs would refuse, rightly, and for tests that are about something else."""

VERIFIED = vg.options.Verify()
"""As by default."""

ON_GPU = vg.options.GpuLayouts(simulated=True)
"""Lets tensors of items on the CPU stand for those on a GPU, which the host does not see."""

SIMULATED = {"backend": "tape", "layouts": ON_GPU}
"""Options with which the tape stands for a GPU."""

BUDGETS = (vg.budgets.Budget(64, items=4), vg.budgets.Budget(128, items=8))


def attention_encoder(budgets=BUDGETS, module=None, spec=None, **options):
    return vg.GraphedEncoder(
        Attention() if module is None else module, budgets, spec or attention_spec(), **(SIMULATED | options)
    )


def encoder_of(module, buffers=(), budgets=BUDGETS, **options):
    """Return an encoder of a module of rows `x` of 8 numbers, described by `lengths`."""
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths(), buffers)
    return vg.GraphedEncoder(module, budgets, spec, **(SIMULATED | options))


def rows_for(lengths, seed=0, dim=8, device="cpu"):
    """Return random rows for items of these lengths, the same on every device."""
    return torch.randn(sum(lengths), dim, generator=torch.Generator().manual_seed(seed)).to(device)


def original_attention(module):
    """Return a function of rows and lengths that runs an attention module without an encoder."""

    def run(rows, lengths):
        with torch.no_grad():
            return module(rows, boundaries(lengths), max(lengths))

    return run


def check(encoder, lengths, unseen=False, make_rows=rows_for, tolerance=1e-5, **static_args):
    """Compare one call with the same call run eager; with `unseen`, only the device knows its lengths."""
    rows = make_rows(lengths, len(lengths))
    got = encoder(rows, lengths=torch.tensor(lengths, device=rows.device) if unseen else lengths, **static_args)
    assert distance(got, encoder.eager(rows, lengths=lengths, **static_args)) < tolerance


def captured(encoder):
    """Return the budgets that have a graph."""
    return {budget for graphs in encoder.executor.store.sets for budget in graphs.budgets}


def wait_for(encoder, budgets, seconds=120):
    """Wait until budgets have graphs, which another thread captures."""
    pause = threading.Event()
    for _ in range(100 * seconds):
        if captured(encoder) >= set(budgets) and not encoder.pool.busy:  # proven, too
            return
        pause.wait(0.01)
    raise AssertionError(f"not captured: {set(budgets) - captured(encoder)}")
