"""Operators that run in the declared forward of an encoder."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def operators(encoder, *args, **kwargs):
    """How often each operator runs in the declared forward of a call."""
    with torch.no_grad(), _Counting() as seen:
        encoder.executor.forward.exact(encoder.executor.bind(args, kwargs))
    return seen.counts


class _Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))
