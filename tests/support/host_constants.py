"""Forwards that make tensors on the host and copy them to the device of their rows."""

import random
from itertools import count

import numpy
import torch
from torch import nn

import varlen_graphs as vg

SPEC = vg.BufferSpec(rows="x", layout=vg.Lengths("lengths"))
EIGHT = [0.5, -1.0, 2.0, 3.0, -4.0, 1.5, 0.25, 7.0]
CALLS = count(1)


class Towers(nn.Module):
    """Runs one of the functions below on rows `[rows, 8]`."""

    def __init__(self, function):
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 8), requires_grad=False)
        self.on_host = torch.tensor(EIGHT)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def from_a_list(m, x):
    return x * torch.tensor(EIGHT, device=x.device)


def new_of_a_list(m, x):
    return x * x.new_tensor(EIGHT)


def from_an_array(m, x):
    return x + torch.as_tensor(numpy.sin(numpy.arange(8)), dtype=torch.float32, device=x.device)


def shared_with_an_array(m, x):
    return x + torch.from_numpy(numpy.cos(numpy.arange(8))).to(x)


def moved_range(m, x):
    return x * torch.linspace(0, 1, 8).to(x.device)


def cast_range(m, x):
    return x * (torch.arange(8)[None] * 0.5).type_as(x)


def one_number(m, x):
    return x + torch.tensor(3.0).to(x.device)


def indexed_by_the_host(m, x):
    return x * m.table[torch.arange(8) % 3].sum()


def indexed_by_a_list(m, x):
    return x[:, [7, 2, 4]] + m.table[[1, 3]].sum()


def relative_positions(m, x):
    """As `get_rel_pos` of SAM does, with weights that are interpolated on the device."""
    weights = nn.functional.interpolate(m.table.T[None], size=15, mode="linear")[0].T
    places = torch.arange(8)[:, None] * max(1, 1.0) - torch.arange(8)[None] + 7
    return x @ weights[places.long()].sum(1)


def written_by_the_host(m, x):
    y = x.clone()
    y[:, 2:4] = torch.tensor([1.0, 2.0])
    return y


def scattered_by_the_host(m, x):
    return torch.zeros_like(x).index_put_((torch.arange(len(x)),), x * 2)


def changed_in_place(m, x):
    offsets = torch.zeros(8).to(x.device)
    offsets += m.table[0]
    return x + offsets


def made_anew_of_the_same_memory(m, x):
    offsets = torch.ones(8)
    first = offsets.to(x.device, copy=True)
    offsets.mul_(3)
    return x * first + offsets.to(x.device, copy=True)


CONSTANTS = [
    from_a_list, new_of_a_list, from_an_array, shared_with_an_array, moved_range, cast_range, one_number,
    indexed_by_the_host, indexed_by_a_list, relative_positions, written_by_the_host, scattered_by_the_host, changed_in_place,
    made_anew_of_the_same_memory,
]  # fmt: skip
"""Functions that a graph can hold, though they copy host tensors to the device."""


def pinned(m, x):
    return x * torch.tensor(EIGHT, pin_memory=True).to(x.device, non_blocking=True)


def counted(m, x):
    return x * torch.tensor([float(next(CALLS))] * 8, device=x.device)


def drawn_by_python(m, x):
    return x * torch.tensor([random.random() for _ in range(8)]).to(x.device)


VARYING = [counted, drawn_by_python]
"""Functions whose host tensors differ from run to run."""


def drawn(m, x):
    return x * torch.rand(8).to(x.device)


def drawn_in_place(m, x):
    return x * torch.empty(8).uniform_().to(x.device)


def permuted(m, x):
    return x[:, torch.randperm(8)]


RANDOM = [drawn, drawn_in_place, permuted]
"""Functions that draw on the host."""


def kept(m, x):
    return x * m.on_host.to(x.device)


def computed_of_kept(m, x):
    return x * (torch.ones(8) + m.on_host).to(x.device)


def written_of_kept(m, x):
    factors = torch.ones(8)
    factors[:4] = m.on_host[:4]
    return x * factors.to(x.device)


def read_of_kept(m, x):
    return x * torch.tensor(m.on_host.tolist(), device=x.device)


def copied_of_kept(m, x):
    return x * torch.tensor(m.on_host, device=x.device)


def taken_of_kept(m, x):
    return x * torch.as_tensor(m.on_host).to(x.device)


def read_as_an_array(m, x):
    return x * torch.from_numpy(m.on_host.numpy()).to(x.device)


def indexed_by_kept(m, x):
    return x + m.table[m.on_host.long()].sum(0)


KEPT = [
    kept, computed_of_kept, written_of_kept, read_of_kept, copied_of_kept, taken_of_kept, read_as_an_array,
    indexed_by_kept,
]  # fmt: skip
"""Functions that copy what the module keeps on the host, and may change."""
