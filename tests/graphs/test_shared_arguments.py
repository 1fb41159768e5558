"""Arguments that are the same memory, which modules must not write to."""

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


def encoder_of(module, one, other):
    buffers = [vg.DeviceBuffer(name, lambda table, of=of: of(table)) for name, of in (("one", one), ("other", other))]
    spec = vg.BufferSpec("x", vg.Lengths("sizes"), buffers=buffers)
    return vg.GraphedEncoder(module.eval(), [64, 128], spec, backend="tape")


def place(table):
    return table.row_in_item


def length(table):
    return table.item_rows[table.row_item]


@pytest.mark.parametrize("inference", [True, False])
def test_a_module_that_writes_to_one_of_two_buffers_that_are_the_same_is_refused(inference):
    encoder = encoder_of(Writes(), place, place)
    message = "writes in place to an argument out of 'one', 'other', which are the same memory"
    with torch.inference_mode(inference), pytest.raises(vg.SpecError, match=message):
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

    spec = attention_spec(buffers=[vg.CuSeqlens(), vg.CuSeqlens("keys"), vg.MaxSeqlen()])
    encoder = vg.GraphedEncoder(Halved().eval(), [64], spec, backend="tape")
    with pytest.raises(vg.SpecError, match="'cu_seqlens', 'keys', which are the same memory"):
        encoder(torch.ones(6, 4), lengths=[6])
