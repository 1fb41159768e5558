"""Modules that compute the same in another way where they get few rows, which no capture of large budgets shows."""

import functools

import torch
from torch import nn

SMALL = 100
"""Rows below which a module does so."""


def cache(module, x):
    """Keep a tensor of each size, from its first run of that size."""
    if len(x) not in module.kept:
        module.kept[len(x)] = torch.ones((len(x), 1), device=x.device)
    return x * module.kept[len(x)]


def last_size(module, x):
    """Keep a tensor of the last size, and make another one when the size changes."""
    if module.last is None or len(module.last) != len(x):
        module.last = torch.ones((len(x), 1), device=x.device)
    return x * module.last


def own_output(module, x):
    """Keep what it computed."""
    module.output = x.clone()
    return module.output


def constant(module, x):
    """Copy a tensor of the host to the device."""
    return x * torch.tensor([1.0] * x.shape[-1], device=x.device)


def number(module, x):
    """Compute something on the host."""
    return x * float(torch.ones(3, device="cpu").mean())


def another(module, x):
    """Read a tensor of its own that no other run reads."""
    return x * module.another


def outside(module, x):
    """Read a tensor that is no part of it."""
    key = x.device, x.dtype
    if key not in OUTSIDE:
        OUTSIDE[key] = torch.ones(x.shape[-1], device=x.device)
    return x * OUTSIDE[key]


def attribute(module, x):
    """Keep a number."""
    module.rows = len(x)
    return x * 1


def read(module, x):
    """Look at rows, which no graph can."""
    return x * 1 if x[0, 0].item() < 1e9 else x


@functools.lru_cache
def table(rows, device):
    """A tensor of each size that no part of the module holds."""
    return torch.ones((rows, 1), device=device)


def cached_outside(module, x):
    """Read a tensor of its size that is cached outside of the module."""
    return x * table(len(x), x.device)


OUTSIDE = {}

FOLLOWED = (cache, last_size, own_output, constant, number, another, outside, cached_outside, attribute)
"""What a graph can hold."""

SIZES = []
"""Rows of every run, those of shadows too."""


class OtherwiseWhereSmall(nn.Module):
    """Runs a function where it gets few rows; may return the tensor that is cached outside, too."""

    def __init__(self, function, small=SMALL, returns=False):
        super().__init__()
        self.small, self.returns = small, returns
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("another", torch.ones(8))
        self.function, self.kept, self.last, self.output, self.rows = function, {}, None, None, 0
        self.eval()

    def forward(self, x):
        SIZES.append(len(x))
        out = self.linear(self.function(self, x) if len(x) < self.small else x)
        return (out, table(len(x), x.device) * 1, table(len(x), x.device)) if self.returns else out
