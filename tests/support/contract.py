"""Checks of encoders: above all the padding contract, that what padding holds never reaches an active row."""

import dataclasses

import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import ON_GPU, rows_for
from tests.support.leftovers import keep_leftovers
from tests.support.towers import distance, equal_bits, tensors


def check_padding_contract(encoder, original, make_rows, argument, layouts, tolerance, more=lambda layout: {}):
    """Replay `layouts` over poisoned memory, and compare with the original and across paddings.

    `layouts` go from large to small to larger; each is replayed once with NaN in all padding, and once over what the
    replay of the first (the largest, of other data) left behind. `more` gives the other arguments of a call.
    """
    encoder.capture()
    for number, layout in enumerate(layouts):
        rows = make_rows(layout, seed=number)
        call = {argument: layout, **more(layout)}
        encoder.poison()
        over_nan = encoder(rows, **call)
        encoder(make_rows(layouts[0], seed=100), **{argument: layouts[0], **more(layouts[0])})
        keep_leftovers(encoder)
        over_leftovers = encoder(rows, **call)
        assert distance(over_nan, original(rows, layout)) <= tolerance, layout
        assert equal_bits(over_nan, over_leftovers), layout
    assert not encoder.stats.eager


def check_ways_to_call(encoder, rows, lengths):
    """Check that a stage and a layout on the device give the same bits; return the output."""
    expected = encoder(rows, lengths=lengths)
    with encoder.stage(lengths) as stage:
        assert stage.rows.shape == rows.shape
        stage.rows.copy_(rows)
    assert equal_bits(stage.output, expected)
    assert equal_bits(encoder(rows, lengths=torch.tensor(lengths)), expected)
    return expected


def check_half_precision(output, eager, exact, dtype):
    """Check that an output is of a dtype, and about as close to that of float32 as the original's eager run."""
    assert distance(output, exact) <= 1.3 * distance(eager, exact)
    assert {tensor.dtype for tensor in tensors(output).values()} == {dtype}


UNCOMMON = [torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.float8_e8m0fnu]
"""Dtypes for which torch lacks some kernels."""


class Cast(nn.Module):
    """Takes rows of any dtype, and returns features of any other, the same bits at any number of rows."""

    def __init__(self, dtype):
        super().__init__()
        self.scale = nn.Parameter(torch.arange(1.0, 9.0))
        self.made = dtype

    def forward(self, x):
        features = (x.to(torch.complex64).real if x.is_complex() else x.float()) * self.scale
        if self.made.is_complex:
            features = torch.complex(features, features + 1)
        return features.to(self.made)


def check_uncommon_dtypes(backend, device, dtype):
    """Check rows and outputs of a dtype: whole, split, staged, padded, packed, and with items on the device."""
    values = (torch.rand(2, 60, 8, generator=torch.Generator().manual_seed(0)) * 9).to(device)
    for packed, made in ((torch.float32, dtype), (dtype, torch.float32), (dtype, dtype)):
        pad = 40_000 if packed is torch.uint16 else 0
        rows = vg.inputs.Rows("x", shape=(8,), dtype=packed, pad=pad)
        module = Cast(made).to(device)
        came = values.to(torch.complex64).to(packed) if packed.is_complex else values.to(packed)
        want = module(came).detach()
        budgets = [vg.budgets.Budget(64, items=4), vg.budgets.Budget(128, items=4)]

        def bits(tensor):
            return tensor.contiguous().view(torch.uint8)

        encoder = vg.GraphedEncoder(
            module, budgets, vg.BufferSpec(rows, vg.Lengths()), backend=backend, layouts=ON_GPU
        ).capture()
        flat, expected = came.flatten(0, 1), want.flatten(0, 1)
        for lengths in ([60, 60], [20] * 6, torch.tensor([60, 60], device=device)):
            encoder.poison()
            assert torch.equal(bits(encoder(flat, lengths=lengths)), bits(expected)), (packed, made, lengths)
        with encoder.stage([60, 60]) as stage:
            stage.rows.copy_(flat)
        assert torch.equal(bits(stage.output), bits(expected))
        spec = vg.BufferSpec(dataclasses.replace(rows, padded_by="mask"), vg.Lengths())
        encoder = vg.GraphedEncoder(module, budgets, spec, backend=backend, layouts=ON_GPU).capture()
        mask = torch.arange(60, device=device) < torch.tensor([[60], [45]], device=device)
        got = encoder(came, lengths=[60, 45], mask=mask)
        assert torch.equal(bits(got)[mask], bits(want)[mask])
        budgets = [vg.budgets.Budget.padded(1, 60), vg.budgets.Budget.padded(2, 30)]
        encoder = vg.GraphedEncoder(
            module, budgets, vg.BufferSpec(rows, vg.Mask("mask")), backend=backend, layouts=ON_GPU
        )
        assert torch.equal(bits(encoder.capture()(came, mask=mask))[mask], bits(want)[mask])


def check_outputs_of_all_kinds(backend, device):
    """Check outputs of all dtypes and strides, and that they are NaN where a layout on the device is wrong."""

    class Kinds(nn.Module):
        def forward(self, x):
            kinds = {str(dtype): x.to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.float8_e4m3fn)}
            return kinds | {"across": x.mT.contiguous().mT, "none": x[:, :0], "zeros": x * -0.0, "positive": x > 0}

    names = ["torch.float64", "torch.bfloat16", "torch.float8_e4m3fn", "across", "none", "zeros", "positive"]
    outputs = vg.outputs.Fields(**dict.fromkeys(names, vg.outputs.Rows()))
    encoder = vg.GraphedEncoder(
        Kinds(), [128], vg.BufferSpec("x", vg.Lengths(), outputs=outputs), backend=backend, layouts=ON_GPU
    )
    rows = rows_for([6]).to(device)
    seen, unseen = encoder(rows, lengths=[6]), encoder(rows, lengths=torch.tensor([6], device=device))
    for name in names:
        own = encoder.eager(rows, lengths=[6])[name].stride()
        assert name == "none" or seen[name].stride() == unseen[name].stride() == own
        same = (one[name].contiguous().view(torch.uint8) for one in (seen, unseen))
        assert torch.equal(*same), name
    wrong = encoder(rows, lengths=torch.tensor([5], device=device))
    assert all(wrong[name].float().isnan().all() for name in names[:-1])
