"""Modules whose calls alone tell what they take, and parts of such calls."""

import dataclasses

import torch
from torch import nn

DIM = 16


@dataclasses.dataclass
class Features:
    rows: torch.Tensor
    pooled: torch.Tensor
    name: str = "features"


class Classifier(nn.Module):
    """Takes images."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, DIM, 3, stride=2), nn.BatchNorm2d(DIM), nn.ReLU())
        self.head = nn.Linear(DIM, 5)

    def forward(self, images, scale=1.0, options=None):
        out = self.head(self.layers(images).mean((2, 3))) * scale
        return out if options is None else {"logits": out * options["factor"], "more": [out, None]}


class Sequences(nn.Module):
    """Takes sequences with what says which of their rows are real: a mask, by either value, or lengths."""

    def __init__(self, real=None, output="rows"):
        super().__init__()
        self.layers = nn.ModuleList([nn.MultiheadAttention(DIM, 4, batch_first=True) for _ in range(2)])
        self.real, self.output = real, output

    def forward(self, x, about=None, scale=None):
        padding = None
        if about is not None and self.real is None:
            padding = torch.arange(x.shape[1], device=x.device) >= about[:, None]
        elif about is not None:
            padding = about.bool() != self.real
        for layer in self.layers:
            x = x + layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        x = x if scale is None else x * scale[:, None, None]
        pooled = x[:, 0]
        return {"rows": x, "both": (x, pooled), "dataclass": Features(x, pooled)}[self.output]


class Model(nn.Module):
    """Two encoders, which its methods call."""

    def __init__(self):
        super().__init__()
        self.images, self.texts = Classifier(), Sequences()
        self.scale = nn.Parameter(torch.ones(()))

    def encode_images(self, images):
        return self.images(images) * self.scale

    def encode_texts(self, x):
        return self.texts(x) * self.scale

    def forward(self, images, x):
        return self.encode_images(images), self.encode_texts(x)


def made(kind, *args):
    torch.manual_seed(0)
    return kind(*args).eval().requires_grad_(False)


def about(lengths, kind, dtype=torch.bool):
    if kind is None:
        return torch.tensor(lengths)
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return (real if kind else ~real).to(dtype)


class Placed(nn.Module):
    """Rows of floats that begin with their place in a table: no other number may stand there."""

    def __init__(self):
        super().__init__()
        self.table, self.layers = nn.Embedding(16, DIM), nn.ModuleList([nn.Linear(DIM, DIM)])

    def forward(self, rows):
        """Embed the places, and project."""
        return self.layers[0](rows[..., 1:] + self.table(rows[..., 0].long()))


def placed(batch, length=16):
    """Rows for `Placed`."""
    places = torch.rand(batch, length).argsort(1)[..., None].float()
    return torch.cat([places, torch.randn(batch, length, DIM)], -1)
