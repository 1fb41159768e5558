"""Declared values of padding that a module does not take as indices."""

import re

import pytest
import torch
from torch import nn

import varlen_graphs as vg

TOKENS = torch.arange(6)
IDS = vg.inputs.Rows("ids", (), dtype=torch.int64)


class Tokens(nn.Module):
    """Embeds ids, and kinds with them."""

    def __init__(self):
        super().__init__()
        self.tokens, self.kinds = nn.Embedding(10, 4), nn.Embedding(3, 4)
        self.eval()

    def forward(self, ids, kinds=None):
        x = self.tokens(ids)
        return x if kinds is None else x + self.kinds(kinds)


class Items(Tokens):
    def forward(self, ids, kinds):
        return self.tokens(ids) + 0 * self.kinds(kinds).sum(0)


def column(pad):
    return vg.BufferSpec(
        IDS,
        vg.Lengths(columns=(vg.layouts.Column("kind", pad=pad, default=1),)),
        [vg.buffers.DeviceBuffer("kinds", lambda table: table.column("kind")[table.row_item])],
    )


def host_buffer(pad):
    kinds = vg.buffers.HostBuffer(
        "kinds", lambda layout: torch.zeros(layout.total, dtype=torch.int64), ("rows",), torch.int64, pad=pad
    )
    return vg.BufferSpec(IDS, vg.Lengths(), [kinds])


def beside(kind, **options):
    return lambda pad: vg.BufferSpec(
        IDS, vg.Lengths(), inputs=[kind("kinds", dtype=torch.int64, **{"pad": pad} | options)]
    )


KINDS = {
    "rows": (Tokens, lambda pad: vg.BufferSpec(vg.inputs.Rows("ids", (), torch.int64, pad), vg.Lengths()), "10", {}),
    "negative rows": (Tokens, lambda pad: vg.BufferSpec(vg.inputs.Rows("ids", (), torch.int64, -1), vg.Lengths()), "-1", {}),
    "entries of rows": (Tokens, beside(vg.inputs.PerRow), "10", {"kinds": torch.zeros(6, dtype=torch.int64)}),
    "entries of items": (Items, beside(vg.inputs.PerItem), "10", {"kinds": torch.zeros(1, dtype=torch.int64)}),
    "entries of items for rows": (Tokens, beside(vg.inputs.PerItem, per_row=True), "10", {"kinds": [0]}),
    "a column": (Tokens, column, "10", {}),
    "a host buffer": (Tokens, host_buffer, "10", {}),
    "a default": (Tokens, beside(vg.inputs.PerRow, default=7, pad=1), "7", {}),
}  # fmt: skip


def check_pads(name, **options):
    """Check that the declaration is named whose value no table has, at each call."""
    module, spec, value, more = KINDS[name]
    device = "cuda" if options.get("backend") == "cuda" else "cpu"
    encoder = vg.GraphedEncoder(module().to(device), [64], spec(10), **options)
    most = 2 if more or "kinds" in str(encoder.spec) else 9
    message = f"{module.__name__} is captured with padding, and takes indices from 0 to {most}, but got {value}: "
    for _ in range(2):
        with pytest.raises(
            vg.errors.SpecError, match=re.escape(message) + rf"\w+\('\w+', (pad|default)={value}\); declare"
        ):
            encoder(TOKENS.to(device), lengths=[6], **more)
