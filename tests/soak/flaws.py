"""Parts that are wrong in a graph: they mix rows, count them, or choose by their number."""

from dataclasses import dataclass

import torch

from tests.soak import parts

FLAWS = {
    "all rows": lambda x: torch.softmax(x @ x.mT / 8, -1) @ x,
    "an odd number": lambda x: x * (1 + x.shape[-2] % 2),
    "cumsum": lambda x: x.cumsum(-2) / 8,
    "few": lambda x: x if x.shape[-2] < 24 else -x,
    "first": lambda x: x - x[..., :1, :],
    "flip": lambda x: x + x.flip(-2),
    "last": lambda x: x - x[..., -1:, :],
    "maximum": lambda x: x / x.abs().amax(),
    "mean": lambda x: x - x.mean(-2, keepdim=True),
    "norm": lambda x: x / x.norm(),
    "place": lambda x: x + torch.arange(x.shape[-2], device=x.device)[:, None] / 8,
    "ramp": lambda x: x * torch.linspace(0, 1, x.shape[-2], device=x.device)[:, None],
    "random": lambda x: x + torch.rand_like(x),
    "ranks": lambda x: x.argsort(-2).argsort(-2).to(x.dtype) / 8,
    "roll": lambda x: x + x.roll(1, -2),
    "size": lambda x: x * (x.shape[-2] // 4),
    "unwritten": lambda x: x + torch.empty_like(x).copy_(torch.empty_like(x)).nan_to_num(1.0).clamp(-1, 1),
}
"""By name; `unwritten` adds what memory held before."""


@dataclass(frozen=True)
class Flaw(parts.Linear):
    """A part that no declaration makes right."""

    name: str

    def run(self, weights, x, buffer):
        return FLAWS[self.name](weights(x))
