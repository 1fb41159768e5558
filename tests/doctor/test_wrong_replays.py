"""The proof of graphs on the tape, as a finding of the doctor."""

import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import Of, rows_for


class Attends(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return torch.softmax(x @ x.T, -1) @ x


def test_attention_over_all_rows_prevents_a_correct_graph():
    diagnosis = vg.diagnose(Attends(8, 8).eval(), rows_for([6]), rows_for([9]))
    (finding,) = diagnosis
    assert (finding.kind, finding.blocks, diagnosis.ok) == ("wrong replay", True, False)
    assert finding.line.source == "return torch.softmax(x @ x.T, -1) @ x"
    assert finding.what.startswith("wrong in Budget(rows=256, items=16, segments=64, max_seqlen=256), replaying items")


def test_a_module_of_rows_and_items_is_proven_with_its_items():
    def wrong(module, x, grid_thw):
        return x + grid_thw.prod(-1).max()

    def right(module, x, grid_thw):
        return 2 * x

    call = {"x": rows_for([12]), "grid_thw": torch.tensor([(1, 2, 3), (2, 1, 3)])}
    assert vg.diagnose(Of(right), call).ok
    (finding,) = [one for one in vg.diagnose(Of(wrong), call) if one.blocks]
    assert finding.kind == "wrong replay"
    assert "items in another order: output of item" in finding.what


def test_modules_with_other_arguments_are_not_proven():
    call = {"x": rows_for([12]), "scale": torch.ones(8)}
    assert vg.diagnose(Of(lambda module, x, scale: (x - x.mean(0)) * scale), call).ok
    call = {"x": rows_for([12]), "factor": 2.0}
    assert vg.diagnose(Of(lambda module, x, factor: (x - x.mean(0)) * factor), call).ok
