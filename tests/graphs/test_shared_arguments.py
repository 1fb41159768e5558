"""`SharedArguments`: arguments that are the same memory, which modules must not write to."""

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import attention_spec


class Writes(nn.Module):
    def forward(self, x, one, other):
        other //= 2
        return (x * one[:, None]).sum(1) + other


class Reads(nn.Module):
    def forward(self, x, one, other):
        return (x * one[:, None]).sum(1) + other // 2


class WritesBoth(nn.Module):
    def forward(self, x, one, other):
        one += 1
        other *= 2
        return (x * one[:, None]).sum(1) + other


def encoder_of(module, one, other):
    buffers = [
        vg.buffers.DeviceBuffer(name, lambda table, of=of: of(table)) for name, of in (("one", one), ("other", other))
    ]
    spec = vg.BufferSpec("x", vg.Lengths("sizes"), buffers=buffers)
    return vg.GraphedEncoder(module.eval(), [64, 128], spec, backend="tape")


def place(table):
    return table.row_in_item


def length(table):
    return table.item_rows[table.row_item]


@pytest.mark.parametrize("inference", [True, False])
def test_a_module_that_writes_to_one_of_two_buffers_that_are_the_same_is_refused(inference):
    encoder = encoder_of(Writes(), place, place)
    message = "writes in place to 'one' or 'other', which are the same memory"
    with torch.inference_mode(inference), pytest.raises(vg.errors.SpecError, match=message):
        encoder(torch.ones(6, 4), sizes=[2, 4])


@pytest.mark.parametrize(
    ("module", "other"),
    [(Reads(), place), (Writes(), lambda table: place(table).clone()), (Writes(), length)],
    ids=["read", "copied", "others"],
)
def test_others_are_captured(module, other):
    encoder = encoder_of(module, place, other)
    for sizes in ([6], [4, 2, 9]):
        places = torch.cat([torch.arange(size) for size in sizes])
        lengths = torch.tensor(sizes).repeat_interleave(torch.tensor(sizes))
        rows = torch.ones(sum(sizes), 4)
        expected = module(rows, places, (lengths if other is length else places).clone())
        assert torch.equal(encoder(rows, sizes=sizes), expected)
    assert not encoder.stats.eager


def test_boundaries_of_queries_and_keys_are_the_same_too():
    class Halved(nn.Module):
        def forward(self, x, cu_seqlens, keys, max_seqlen):
            cu_seqlens.div_(2, rounding_mode="floor")
            q = k = v = x[:, None]
            return vg.varlen_attention(q, k, v, cu_seqlens, max_seqlen, cu_seqlens_k=keys)[:, 0]

    spec = attention_spec(buffers=[vg.buffers.CuSeqlens(), vg.buffers.CuSeqlens("keys"), vg.buffers.MaxSeqlen()])
    encoder = vg.GraphedEncoder(Halved().eval(), [64], spec, backend="tape")
    with pytest.raises(vg.errors.SpecError, match="'cu_seqlens' or 'keys', which are the same memory"):
        encoder(torch.ones(6, 4), lengths=[6])


def test_views_that_lie_between_each_other_are_no_shared_memory():
    at = [lambda table, i=i: table.positions("raster")[i] for i in (1, 2)]
    buffers = [vg.buffers.DeviceBuffer(name, of) for name, of in zip(("one", "other"), at, strict=True)]
    module = WritesBoth().eval()
    encoder = vg.GraphedEncoder(
        module, [64], vg.BufferSpec("x", vg.layouts.GridHW("sizes"), buffers=buffers), backend="tape"
    )
    h, w = torch.arange(2).repeat_interleave(3), torch.arange(3).repeat(2)
    assert torch.equal(encoder(torch.ones(6, 4), sizes=[(2, 3)]), module(torch.ones(6, 4), h, w))
    assert not encoder.stats.eager


def test_nan_in_shared_memory_is_no_change():
    class Ignores(nn.Module):
        def forward(self, x, one, other):
            return x * 2

    def ratio(table):
        return vars(table).setdefault("ratio", table.row_in_item / 0.0)

    encoder, rows = encoder_of(Ignores(), ratio, ratio), torch.ones(6, 4)
    assert torch.equal(encoder(rows, sizes=[2, 4]), rows * 2)
