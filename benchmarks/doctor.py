"""Ask the doctor about towers of transformers, run plainly, and write the tables of docs/appendix-doctor.md.

Each tower is built tiny, with random weights, and called with several layouts of as many rows.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import transformers
from torch import nn

import varlen_graphs as vg
from benchmarks.common import table
from benchmarks.generic import build
from varlen_graphs.doctor.branches import statement

PAGE = Path("docs/appendix-doctor.md")
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


def findings(name: str) -> str:
    """What the doctor says of a tower, as a table."""
    module, calls = TOWERS[name]()
    diagnosis = vg.diagnose(module, *calls)
    cells = [
        (
            finding.kind, f"`{place(finding.line)}`", f"`{code(finding.line)}`".replace("|", "\\|"),
            ", ".join(path or "itself" for path in finding.modules), finding.count, finding.declaration or "",
        )
        for finding in diagnosis
    ]  # fmt: skip
    return f"### {name}\n\n" + table(("kind", "where", "statement", "module", "times", "declare"), cells)


def main() -> None:
    """Fill the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--only", nargs="*", default=list(TOWERS), help="names of towers; print, and write no page")
    options = parser.parse_args()
    made = "\n\n".join(findings(name) for name in options.only)
    print(made)
    if options.only == list(TOWERS):
        options.page.write_text(PLACE.sub(lambda m: f"{m[1]}\n{made}\n\n{m[3]}", options.page.read_text()))


if __name__ == "__main__":
    main()
