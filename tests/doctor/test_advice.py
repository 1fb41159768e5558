"""What the doctor says to declare: a declaration to paste, a recipe, the keyword arguments that a tower takes."""

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.doctor.layouts import TWO
from tests.support.encoders import Of


def declarations(function):
    return {finding.declaration for finding in vg.diagnose(Of(function), *TWO) if finding.blocks}


def get_positions(lengths, kwargs):
    if (position_ids := kwargs.pop("position_ids", None)) is not None:
        return position_ids
    return torch.cat([torch.arange(length, device=lengths.device) for length in lengths.tolist()])


class Tower(nn.Module):
    def forward(self, x, lengths, **kwargs):
        return x + get_positions(lengths, kwargs)[:, None] * lengths.max().item()


def test_the_summary_is_a_declaration_to_paste_with_the_keywords_that_the_module_takes():
    diagnosis = vg.diagnose(Tower(), *TWO)
    positions = [finding for finding in diagnosis if finding.line.function == "get_positions"]
    assert {finding.arguments for finding in positions} == {("position_ids",)}
    for words in (
        'rows="x",',
        'layout=vg.Lengths("lengths"),',
        "vg.buffers.RowPositions(),",
        "vg.buffers.MaxSeqlen(),",
        "The module takes position_ids as keyword arguments: vg.recipes.generic(module)",
    ):
        assert words in diagnosis.summary
    assert str(diagnosis).endswith(diagnosis.summary)
    assert not vg.diagnose(nn.Linear(4, 4), torch.ones(2, 4)).summary


def test_the_summary_names_the_recipe_of_the_tower():
    tower = type("Qwen3VLVisionModel", (Tower,), {})()
    assert "vg.recipes.qwen3_vl(module)" in vg.diagnose(tower, *TWO).summary


def block_mask(m, x, lengths):
    attention_mask = torch.zeros(8, 8, device=x.device)
    start = 0
    for length in lengths.tolist():
        attention_mask[start : start + length] = 1
        start += length
    return attention_mask @ x


def buckets(m, x, lengths):
    bucket_coords = torch.arange(lengths.max(), device=x.device)
    return x * bucket_coords.sum()


def split_output(m, x, lengths):
    return (x * 2).split(lengths.tolist())


@pytest.mark.parametrize(
    ("function", "says"), [(block_mask, "varlen_attention"), (buckets, "torch.bucketize"), (split_output, "Rows()")]
)
def test_remedies_fit_what_is_computed(function, says):
    found = declarations(function)
    assert any(says in (declaration or "") for declaration in found)
    assert not any("Mask" in (declaration or "") for declaration in found)


def test_the_report_shows_whole_statements():
    def forward(m, x, lengths):
        return torch.arange(
            max(lengths.tolist()),
            device=x.device,
        )

    text = str(vg.diagnose(Of(forward), *TWO))
    assert "return torch.arange( max(lengths.tolist()), device=x.device, )" in text
