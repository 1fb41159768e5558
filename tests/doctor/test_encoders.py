"""A module that calls a graphed encoder is diagnosed around it."""

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import Attention, attention_encoder, captured, rows_for

CALLS = [{"x": rows_for(own), "lengths": torch.tensor(own)} for own in ([3, 3], [2, 4])]


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.proj = attention_encoder(), nn.Linear(8, 8)
        self.eval()

    def forward(self, x, lengths):
        y = self.tower(x, lengths=lengths)
        y += 1
        if y.sum().item() > 0:
            y = y * 2
        return self.proj(y)


@pytest.mark.parametrize("calls_before", [0, 1])
def test_the_encoder_is_named_and_what_is_around_it_is_examined(calls_before):
    outer = Outer()
    for call in CALLS[:calls_before]:
        with torch.no_grad():
            outer(**call)
    before = captured(outer.tower)
    encoder, sync = vg.diagnose(outer, *CALLS)
    assert (encoder.kind, encoder.blocks, encoder.line.source) == (
        "graphed encoder", True, "y = self.tower(x, lengths=lengths)"
    )  # fmt: skip
    assert "the GraphedEncoder of Attention" in encoder.what
    assert "encoder.module" in encoder.remedy
    assert (sync.kind, sync.line.source) == ("host sync", "if y.sum().item() > 0:")
    assert captured(outer.tower) == before
    assert outer.tower.stats.eager["the module around it is diagnosed"]


def test_afterwards_the_encoder_replays_graphs_as_before():
    outer = Outer()
    vg.diagnose(outer, *CALLS)
    with torch.no_grad():
        outer(**CALLS[0])
    assert captured(outer.tower)


def test_an_encoder_itself_is_refused_with_what_to_pass_instead():
    with pytest.raises(vg.errors.InputError, match=r"got a GraphedEncoder: .* pass encoder\.module"):
        vg.diagnose(attention_encoder(), *CALLS)


def test_a_tower_that_is_wrapped_is_named_as_such():
    tower = Attention()
    tower.forward = attention_encoder(module=tower).forward
    (finding,) = vg.diagnose(tower, *CALLS)
    assert finding.kind == "graphed encoder"
    assert "vg.unwrap(model)" in finding.remedy
    assert finding.line.source.startswith("def forward(self, x, cu_seqlens, max_seqlen")
