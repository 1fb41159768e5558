"""Ask the doctor about towers of transformers, run plainly; write docs/appendix-doctor.md and docs/doctor_towers.csv.

Each tower is built tiny, with random weights, and called with several layouts of as many rows.
"""

import argparse
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

import varlen_graphs as vg
from benchmarks.common import csv_text, table
from benchmarks.generic import build
from varlen_graphs.doctor.branches import statement

DOCS = Path(__file__).parent.parent / "docs"
PAGE, CSV = DOCS / "appendix-doctor.md", DOCS / "doctor_towers.csv"
PLACE = re.compile(r"(<!-- towers -->\n)(.*?)(<!-- end -->)", re.DOTALL)
SITE_PACKAGES = Path(transformers.__file__).parent.parent

IMAGES = [[[1, 8, 8], [1, 4, 8]], [[1, 4, 4], [1, 8, 10]], [[1, 4, 4], [1, 4, 4], [1, 8, 8]]]
VIDEOS = [*IMAGES, [[2, 4, 4], [1, 8, 8]]]
CLIPS = [[100, 60], [80, 80], [120, 20, 20]]
"""Layouts of 96 rows, and of 160."""

Made = tuple[nn.Module, list[dict[str, Any]]]


def grids(name: str, rows: str, layouts: list[list[list[int]]], *shape: int) -> Callable[[], Made]:
    """A vision tower and a call for each layout."""
    calls = [{rows: torch.randn(shape), "grid_thw": torch.tensor(layout)} for layout in layouts]
    return lambda: (build(name), calls)


def clips(name: str) -> Callable[[], Made]:
    """An audio tower and its calls."""
    calls = [{"input_features": torch.randn(16, 160), "feature_lens": torch.tensor(layout)} for layout in CLIPS]
    return lambda: (build(name), calls)


def modern_bert() -> Made:
    """Padded batches, one of them without padding."""
    config = transformers.ModernBertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=48,
        local_attention=16, global_attn_every_n_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    lengths = torch.tensor([[40, 25, 8], [40, 40, 40], [31, 40, 2]])
    calls = [
        {"input_ids": torch.randint(3, 100, (3, 40)), "attention_mask": (torch.arange(40) < own[:, None]).long()}
        for own in lengths
    ]
    return transformers.ModernBertModel(config).eval(), calls


def siglip2() -> Made:
    """Padded batches of images."""
    config = transformers.Siglip2VisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_patches=25, patch_size=4
    )
    shapes = torch.tensor([[[4, 6], [3, 4]], [[5, 5], [2, 7]], [[5, 5], [5, 5]]])
    calls = [
        {
            "pixel_values": torch.randn(2, 25, 48),
            "pixel_attention_mask": (torch.arange(25) < own.prod(-1)[:, None]).long(),
            "spatial_shapes": own,
        }
        for own in shapes
    ]
    return transformers.Siglip2VisionModel(config).eval(), calls


TOWERS: dict[str, Callable[[], Made]] = {
    "Qwen3-VL": grids("Qwen3VLVisionModel", "hidden_states", VIDEOS, 96, 96),
    "Qwen2.5-VL": grids("Qwen2_5_VisionTransformerPretrainedModel", "hidden_states", VIDEOS, 96, 96),
    "Qwen2-VL": grids("Qwen2VisionTransformerPretrainedModel", "hidden_states", VIDEOS, 96, 96),
    "GLM-4.1V": grids("Glm4vVisionModel", "hidden_states", IMAGES, 96, 96),
    "ModernBERT": modern_bert,
    "SigLIP 2": siglip2,
    "Qwen3-Omni audio": clips("Qwen3OmniMoeAudioEncoder"),
    "Qwen2.5-Omni audio": clips("Qwen2_5OmniAudioEncoder"),
    "PaddleOCR-VL": grids("PaddleOCRVisionModel", "pixel_values", IMAGES, 1, 96, 3, 4, 4),
    "Kimi-K2.5": grids("Kimi_K25VisionModel", "pixel_values", IMAGES, 96, 3, 4, 4),
}
"""What makes a tower and its calls, by name."""


def place(line: Any) -> str:
    """A line without the folder that packages are installed in."""
    return f"{line.file.removeprefix(f'{SITE_PACKAGES}/transformers/')}:{line.number}"


def code(line: Any) -> str:
    """The statement at a line, shortened."""
    return shorten(statement(line), 120, placeholder=" ...")


class Row(NamedTuple):
    """A finding in a tower."""

    tower: str
    kind: str
    line: str
    statement: str
    modules: str
    times: str
    declare: str


def findings(name: str, diagnosis: vg.doctor.Diagnosis) -> list[Row]:
    """What the doctor says of a tower."""
    return [
        Row(
            name, finding.kind, place(finding.line), code(finding.line),
            ", ".join(path or "itself" for path in finding.modules), str(finding.count), finding.declaration or "",
        )
        for finding in diagnosis
    ]  # fmt: skip


def summary(rows: Sequence[Row]) -> str:
    """The tables of the page: findings by tower, and by kind."""
    towers = []
    for name in dict.fromkeys(row.tower for row in rows):
        own = Counter(_buffer(row.declare) for row in rows if row.tower == name)
        towers.append((name, own.total(), ", ".join(f"{buffer} ({count})" for buffer, count in own.most_common())))
    kinds = []
    for kind, count in Counter(row.kind for row in rows).most_common():
        of_kind = [row for row in rows if row.kind == kind]
        example = min((row.statement for row in of_kind), key=len).replace("|", "\\|")
        kinds.append((kind, count, len({row.tower for row in of_kind}), f"`{example}`"))
    by_tower = table(("tower", "findings", "to declare"), towers)
    return f"{by_tower}\n\n{table(('kind', 'findings', 'towers', 'for example'), kinds)}"


def _buffer(declare: str) -> str:
    """The buffer of a suggestion, without the rest of its words."""
    name = declare.removeprefix("the layout ").split(",")[0].split(" (of")[0].split("(Windows")[0]
    return f"`{name}`" if name else "your own"


def filled(page: str, rows: Sequence[Row]) -> str:
    """The page with its tables."""
    return PLACE.sub(lambda m: f"{m[1]}\n{summary(rows)}\n\n{m[3]}", page)


def main() -> None:
    """Fill the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(TOWERS), help="names of towers; print, and write nothing")
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.only:
        module, calls = TOWERS[name]()
        rows += findings(name, vg.diagnose(module, *calls))
    print(*(" | ".join(row) for row in rows), sep="\n")
    if options.only == list(TOWERS):
        CSV.write_text(csv_text(Row._fields, rows))
        PAGE.write_text(filled(PAGE.read_text(), rows))


if __name__ == "__main__":
    main()
