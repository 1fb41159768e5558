"""Encoders of padded batches that return fewer or more entries than they get rows, as those of speech do."""

import torch
from torch import nn

import varlen_graphs as vg
from tests.support.leftovers import keep_leftovers
from tests.support.towers import distance, equal_bits

DIM = 8
BUDGETS = (vg.budgets.Budget.padded(2, 32), vg.budgets.Budget.padded(4, 64))


def half(rows):
    return (rows - 1) // 2 + 1


def quarter(rows):
    return half(half(rows))


def frames(rows):
    """Frames of a waveform, by two convolutions without padding: kernels of 5 and 3, strides of 3 and 2."""
    return ((rows - 5) // 3 + 1 - 3) // 2 + 1


class Subsampling(nn.Module):
    """Two convolutions of stride 2, as Conformers have: each reads past the end of an item, so masks lie between."""

    def __init__(self, masked=True):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Conv1d(DIM, DIM, 3, 2, 1) for _ in range(2))
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, batch_first=True)
        self.masked = masked
        self.eval().requires_grad_(False)

    def forward(self, x, half_mask, mask):
        x = self.first(x.mT).relu()
        x = x * half_mask[:, None] if self.masked else x
        x = self.second(x).mT.relu()
        return self.layer(x, src_key_padding_mask=~mask)


SUBSAMPLING = vg.BufferSpec(
    rows=vg.inputs.Rows("x", (DIM,)),
    layout=vg.Lengths("lengths", padded=True),
    buffers=[vg.buffers.Mask("half_mask", of_item=half), vg.buffers.Mask("mask", of_item=quarter)],
    outputs=vg.outputs.Entries(quarter),
)


class Waveform(nn.Module):
    """Convolutions without padding over single samples, as in wav2vec 2: real frames read real samples only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv1d(1, DIM, 5, 3), nn.Conv1d(DIM, DIM, 3, 2)
        self.eval().requires_grad_(False)

    def forward(self, x):
        return self.second(self.first(x[:, None]).relu()).mT


WAVEFORM = vg.BufferSpec(
    vg.inputs.Rows("x", ()), vg.Lengths("lengths", padded=True), outputs=vg.outputs.Entries(frames)
)


class Pooled(nn.Module):
    """The mean of every two rows, and each row twice."""

    def forward(self, x):
        return {"pooled": x.unflatten(1, (-1, 2)).mean(2), "doubled": x.repeat_interleave(2, 1)}


POOLED = vg.BufferSpec(
    vg.inputs.Rows("x", (DIM,)),
    vg.Lengths("lengths", padded=True),
    outputs={"pooled": vg.outputs.Rows(every=2), "doubled": vg.outputs.Entries(lambda rows: 2 * rows)},
)


def shrinking(module, spec, **options):
    options = {"backend": "tape", "verify": vg.options.Verify(strict=True)} | options
    return vg.GraphedEncoder(module, BUDGETS, spec, **options)


def subsampled(lengths, device="cpu", dtype=torch.float32, module=None, seed=0):
    """Return a batch, and what the module returns for each item alone."""
    module = module or Subsampling()
    x = torch.randn(len(lengths), max(lengths), DIM, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    expected = x.new_zeros(len(lengths), quarter(max(lengths)), DIM)
    for i, length in enumerate(lengths):
        masks = [torch.ones(1, of_item(length), dtype=torch.bool, device=device) for of_item in (half, quarter)]
        expected[i, : quarter(length)] = module(x[i : i + 1, :length], *masks)[0]
    return x, expected


def check_subsampling(encoder, device, dtype, tolerance):
    """Check the padding contract of an encoder of `Subsampling`."""
    for seed, lengths in enumerate(([64, 33, 17, 50], [9], [32, 1], [64, 2, 3, 63, 40, 12], [20, 21])):
        x, expected = subsampled(lengths, device, dtype, encoder.module, seed)
        encoder(x, lengths=lengths)
        encoder.poison()
        over_nan = encoder(x, lengths=lengths)
        encoder(torch.full_like(x[:1].repeat(4, 1, 1), 100), lengths=[x.shape[1]] * 4)
        keep_leftovers(encoder)
        assert equal_bits(over_nan, encoder(x, lengths=lengths)), lengths
        assert distance(over_nan, expected) <= tolerance, lengths
    assert not encoder.stats.eager
