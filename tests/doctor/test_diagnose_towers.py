"""The doctor's findings about towers of transformers against lists made by reading their source."""

from functools import cache

import pytest
import transformers
from torch import nn

import varlen_graphs as vg

if transformers.__version__ < "5.15" or transformers.__version__.startswith("4."):
    pytest.skip("the lists are of transformers 5.15 and later", allow_module_level=True)

from transformers import vision_utils

from benchmarks import doctor
from benchmarks.common import read_csv
from benchmarks.doctor import TOWERS
from varlen_graphs.attention.transformers import use_attention

POSITION_IDS = [
    ("copy to device", "get_vision_position_ids", "torch.tensor([spatial_merge_size], device=device)"),
    ("host sync", "get_vision_position_ids", "zip(grid_thw.tolist(), spatial_merge_size.tolist())"),
    ("frozen value", "get_vision_position_ids", "torch.arange(h, "),
]
"""Angles of rotary embeddings: ids are made image by image. `.tolist()` is called twice on one line."""

FRAMES = [("frozen value", "get_vision_position_ids", ".repeat(t, 1)")]
"""The same ids for each frame of a video."""

CU_SEQLENS = [("data-dependent shape", "get_vision_cu_seqlens", "torch.repeat_interleave(")]

ATTENTION = [
    ("host sync", "forward", "torch.split(tensor, lengths.tolist(), dim=2)"),
    ("frozen branch", "forward", "attn_outputs = ["),
]
"""Attention other than FlashAttention runs segment by segment."""

INTERPOLATION = [
    ("data-dependent shape", "get_vision_interpolation_indices_and_weights", "heights = torch.repeat_interleave("),
    ("data-dependent shape", "get_vision_interpolation_indices_and_weights", "widths = torch.repeat_interleave("),
    ("data-dependent shape", "get_vision_interpolation_indices_and_weights", "starts = torch.repeat_interleave("),
    ("host sync", "get_vision_interpolation_indices_and_weights", "torch.arange(counts.sum(), "),
]

WINDOWS = [
    ("host sync", "get_vision_window_index", "in grid_thw.tolist():"),
    ("copy to device", "get_vision_window_index", "torch.tensor(cu_window_seqlens, device="),
    ("data-dependent shape", "get_vision_window_index", "torch.unique_consecutive("),
    ("host tensor", "permute_input_for_window_attn", "input_tensor[window_index, :, :]"),
    ("host tensor", "forward", "merged_hidden_states[reverse_indices, :]"),
]
"""The window index is computed on the host, and stays there."""

READ = {
    "Qwen3-VL": INTERPOLATION + POSITION_IDS + FRAMES + CU_SEQLENS + ATTENTION,
    "Qwen2.5-VL": POSITION_IDS + FRAMES + CU_SEQLENS + WINDOWS + ATTENTION,
    "GLM-4.1V": POSITION_IDS + CU_SEQLENS + ATTENTION,
    "ModernBERT": [
        ("branch", "_ignore_bidirectional_mask_sdpa", "padding_mask.all()"),
        ("frozen branch", "sdpa_mask", "_ignore_bidirectional_mask_sdpa("),  # no mask where nothing is padding
    ],
}
"""Kind, function and a part of the line. `padding_mask.all()` is asked for full and for sliding attention."""

CSV_MADE_WITH = "5.23.0"

LAYERS = {"Qwen3-VL": 3, "Qwen2.5-VL": 3, "GLM-4.1V": 3}


@cache
def diagnosed(name):
    module, calls = TOWERS[name]()
    return vg.diagnose(module, *calls)


@pytest.mark.parametrize("name", READ)
def test_nothing_is_missed_and_nothing_invented(name):
    diagnosis = diagnosed(name)
    if transformers.__version__ == CSV_MADE_WITH:
        assert doctor.findings(name, diagnosis) == [
            row for row in read_csv(doctor.CSV, doctor.Row) if row.tower == name
        ]
    findings = list(diagnosis)
    for kind, function, part in READ[name]:
        (finding,) = [f for f in findings if (f.kind, f.line.function) == (kind, function) and part in f.line.source]
        findings.remove(finding)
        if (kind, function) in (
            ("host sync", "get_vision_position_ids"),
            ("branch", "_ignore_bidirectional_mask_sdpa"),
        ):
            assert finding.count == 2
        if "lengths.tolist()" in part:
            assert (finding.count, finding.modules) == (3 * LAYERS[name], ("blocks.*.attn",))
    assert not findings


def test_the_page_counts_the_rows_of_the_csv():
    page, rows = doctor.PAGE.read_text(), read_csv(doctor.CSV, doctor.Row)
    assert {row.tower for row in rows} == {*TOWERS}
    assert f"transformers {CSV_MADE_WITH}." in page
    assert doctor.filled(page, rows) == page


def test_buffers_are_suggested_by_name():
    suggested = {f.line.function: f.declaration for f in diagnosed("Qwen2.5-VL")}
    assert suggested["get_vision_cu_seqlens"] == "CuSeqlens"
    assert suggested["get_vision_position_ids"].startswith("GridPositions")
    assert suggested["get_vision_window_index"].startswith("WindowIndex")


def test_with_what_it_asks_for_nothing_stands_in_the_way():
    """What the helpers would compute is passed in, as buffers are, and attention takes `cu_seqlens`."""
    module, calls = TOWERS["Qwen3-VL"]()
    for call in calls:
        grid = call["grid_thw"]
        call["interp_indices"], call["interp_weights"] = vision_utils.get_vision_interpolation_indices_and_weights(
            grid, module.num_grid_per_side, mode="bilinear", align_corners=True, spatial_merge_size=2
        )
        call["position_ids"] = vision_utils.get_vision_position_ids(grid, 2)
        call |= {"cu_seqlens": vision_utils.get_vision_cu_seqlens(grid), "max_seqlen": 96}

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = module

        def forward(self, **given):
            with use_attention(self.tower):
                return self.tower(**given)

    assert not list(vg.diagnose(Attends().eval(), *calls))
