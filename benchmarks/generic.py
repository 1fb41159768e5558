"""Try towers of transformers without a recipe, and write docs/appendix-towers.md and docs/generic_towers.csv.

Each tower is built tiny, with weights large enough that errors show, graphed by `vg.recipes.generic` and replayed on
the tape, with NaN in all padding; its outputs are compared with those of the tower called plainly.
"""

import argparse
import importlib
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

import varlen_graphs as vg
from benchmarks.common import csv_text, table

DOCS = Path(__file__).parent.parent / "docs"
PAGE, CSV = DOCS / "appendix-towers.md", DOCS / "generic_towers.csv"
PLACE = re.compile(r"(<!-- towers -->\n)(.*?)(<!-- end -->)", re.DOTALL)

DEEP = {"depth": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "patch_size": 4}
LAYERS = {
    "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "patch_size": 4,
}  # fmt: skip
CLIPS = {
    "num_mel_bins": 16, "encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "d_model": 32,
    "output_dim": 24, "n_window": 50,
}  # fmt: skip
OUT, TABLE = {"out_hidden_size": 48}, {"num_position_embeddings": 64}
DEEPSTACK = DEEP | OUT | TABLE | {"deepstack_visual_indexes": [1]}

TOWERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "CohereCompassVisionModel": ("cohere_compass", "VisionConfig", DEEPSTACK),
    "Cosmos3EdgeVisionModel": ("cosmos3_edge", "VisionConfig", LAYERS | {"num_patches": 64}),
    "Dots3NoteVisionModel": (
        "dots3_note", "VisionConfig",
        LAYERS | {"adapter_in_dim": 64, "adapter_out_dim": 48, "mlp_layer_types": ["dense"] * 3},
    ),
    "Ernie4_5_VLMoeVisionTransformerPretrainedModel": ("ernie4_5_vl_moe", "VisionConfig", DEEP),
    "Exaone4_5_VisionModel": ("exaone4_5", "VisionConfig", DEEP | OUT | {"num_key_value_heads": 2, "window_size": 16}),
    "Glm4vVisionModel": ("glm4v", "VisionConfig", DEEP | OUT | {"image_size": 32}),
    "Glm5NextVisionModel": ("glm5_next", "VisionConfig", DEEP | OUT | {"projection_intermediate_size": 80}),
    "GlmImageVisionModel": ("glm_image", "VisionConfig", DEEP | {"image_size": 32}),
    "GlmOcrVisionModel": ("glm_ocr", "VisionConfig", DEEP | OUT),
    "HunYuanVLVisionTransformer": ("hunyuan_vl", "VisionConfig", LAYERS | OUT | {"text_hidden_size": 48}),
    "Inkling2VisionModel": ("inkling2", "VisionConfig", LAYERS | {"projection_hidden_dim": 64, "text_hidden_size": 48}),
    "Kimi_K25VisionModel": ("kimi_k25", "VisionConfig", LAYERS | {"pos_emb_height": 8, "pos_emb_width": 8}),
    "Lfm3VlVisionModel": ("lfm3_vl", "VisionConfig", LAYERS | {"num_key_value_heads": 2}),
    "MiniCPMV4_6VisionModel": ("minicpmv4_6", "VisionConfig", LAYERS | {"image_size": 32, "insert_layer_id": 1}),
    "MiniMaxM3VLVisionModel": ("minimax_m3_vl", "VisionConfig", LAYERS),
    "MuseGlimmerVisionModel": ("muse_glimmer", "VisionConfig", LAYERS | {"pos_emb_height": 8, "pos_emb_width": 8}),
    "MuseSparkVisionModel": ("muse_spark", "VisionConfig", LAYERS | {"pos_emb_height": 8, "pos_emb_width": 8}),
    "PaddleOCRVisionModel": ("paddleocr_vl", "VisionConfig", LAYERS | {"image_size": 32}),
    "Qwen2VisionTransformerPretrainedModel": ("qwen2_vl", "VisionConfig", {
        "depth": 3, "embed_dim": 64, "hidden_size": 48, "mlp_ratio": 2, "num_heads": 4, "patch_size": 4,
    }),
    "Qwen2_5OmniAudioEncoder": ("qwen2_5_omni", "AudioEncoderConfig", CLIPS),
    "Qwen2_5OmniVisionEncoder": ("qwen2_5_omni", "VisionEncoderConfig", DEEP | OUT | {"window_size": 16}),
    "Qwen2_5_VisionTransformerPretrainedModel": ("qwen2_5_vl", "VisionConfig", DEEP | OUT | {"window_size": 16}),
    "Qwen3OmniMoeAudioEncoder": ("qwen3_omni_moe", "AudioEncoderConfig", CLIPS | {
        "downsample_hidden_size": 8, "n_window_infer": 200,
    }),
    "Qwen3OmniMoeVisionEncoder": ("qwen3_omni_moe", "VisionEncoderConfig", DEEPSTACK),
    "Qwen3VLVisionModel": ("qwen3_vl", "VisionConfig", DEEPSTACK),
    "Qwen3_5VisionModel": ("qwen3_5", "VisionConfig", DEEP | OUT | TABLE),
    "Qwen4ExpVisionModel": ("qwen4_exp", "VisionConfig", DEEP | OUT | TABLE),
    "Step3p7VisionModel": ("step3p7", "VisionConfig", LAYERS | {"image_size": 32}),
    "VideoLlama3VisionModel": ("video_llama_3", "VisionConfig", LAYERS),
}  # fmt: skip
"""Family, the end of the name of its configurations, and a tiny configuration, by class of towers."""

GRIDS = [
    [(1, 12, 8), (1, 4, 20), (1, 8, 8)], [(1, 4, 4)], [(2, 8, 12), (2, 4, 4)], [(3, 4, 8)], [(1, 16, 32)],
    [(1, 4, 8), (1, 8, 4), (1, 20, 4), (1, 12, 12)],
]  # fmt: skip
LENGTHS = [[300, 150], [37], [512], [1, 90, 3, 200], [101, 99, 200]]
BUDGETS = [vg.budgets.Budget(rows, items=4, segments=rows // 4) for rows in (256, 512)]


REASONS = {
    "reads a tensor": "reads the grid on the host",
    "it raises": "raises on synthetic grids",
    "expected one of": "takes neither `grid_thw` nor `feature_lens`",
    "differs": "depends on items in other ways",
    "requires": "requires `merge_sizes` too",
}
"""Why towers cannot be declared, in a few words, by a part of the reason; the first that fits."""


class Row(NamedTuple):
    """One tower: its class, the version of transformers, what was inferred, and the error or why there is none."""

    tower: str
    transformers: str
    requests: str
    returns: str
    error: str
    reason: str


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny tower with enlarged weights.

    Raises:
        ModuleNotFoundError: This transformers has no such family.
    """
    family, ending, settings = TOWERS[name]
    folder = f"transformers.models.{family}"
    modeling = importlib.import_module(f"{folder}.modeling_{family}")
    configs = vars(importlib.import_module(f"{folder}.configuration_{family}"))
    config = next(configs[n] for n in configs if n.endswith(ending) and n.startswith(name[:4]))
    torch.manual_seed(seed)
    tower = getattr(modeling, name)._from_config(config(**(settings | changes)), dtype=dtype)
    enlarge(tower)
    return tower.eval()


def enlarge(model: nn.Module) -> None:
    """Make random weights large enough that errors show in the output."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * max(1, parameter[0].numel()) ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def rows_for(encoder: vg.GraphedEncoder, items: Sequence[Any], seed: int) -> Tensor:
    """Random rows of a call."""
    packed = encoder.spec.row_input
    count = sum(items) if isinstance(items[0], int) else sum(t * h * w for t, h, w in items)
    shape = packed.argument_shape((count,), packed.shape or ())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tensors(output: Any) -> dict[str, Tensor]:
    """The tensors of an output by their fields."""
    parts = {n: part if isinstance(part, list | tuple) else [part] for n, part in output.items()}
    return {f"{name}[{i}]": tensor for name, part in parts.items() for i, tensor in enumerate(part)}


def distance(came: Any, expected: Any) -> float:
    """Relative L2 of the worst tensor; of the fields that came."""
    references = tensors(expected)
    pairs = [(tensor.double(), references[name].double()) for name, tensor in tensors(came).items()]
    return max(((a - b).norm() / b.norm()).item() if a.shape == b.shape else float("inf") for a, b in pairs)


def inferred(encoder: vg.GraphedEncoder) -> tuple[str, str]:
    """What a tower asks for and gives, in words."""
    names: dict[str, list[str]] = {}
    for buffer in encoder.spec.buffers:
        names.setdefault(_settings(buffer), []).append(buffer.name)
    asks = [", ".join(own) + (f" ({settings})" if settings else "") for settings, own in names.items()]
    fields = {**encoder.spec.outputs.fields}  # type: ignore[union-attr]
    fields.pop("hidden_states", None)  # which most towers give if they are asked
    return "; ".join(asks), ", ".join(f"{name}: {_extent(extent)}" for name, extent in fields.items())


def _settings(buffer: Any) -> str:
    settings = [str(getattr(buffer, name)) for name in ("per", "mode") if hasattr(buffer, name)]
    if hasattr(buffer, "align_corners"):
        settings.append("corners aligned" if buffer.align_corners else "half-pixel")
    settings += ["".join(buffer.axes)] if hasattr(buffer, "axes") else []
    settings += [buffer.order.replace("merge_block", "merge blocks")] if hasattr(buffer, "order") else []
    return ", ".join(settings)


def _extent(extent: Any) -> str:
    if isinstance(extent, list):
        return f"{len(extent)} of {_extent(extent[0])}"
    name = type(extent).__name__
    return f"{name}({f'every={extent.every}' if getattr(extent, 'every', 1) > 1 else ''})"


def shortened(message: str) -> str:
    """Why there is no encoder: the message without its advice, and with file names for paths."""
    reason = " ".join(message.split("needs a recipe: ")[-1].split("\nTo write")[0].split("\n")[:2])
    return re.sub(r"\S*/(\w+\.py)", r"\1", re.sub(r"\s+", " ", reason))[:300]


def try_tower(name: str) -> Row:
    """Graph a tower and compare it on several layouts."""
    tower = build(name)
    try:
        encoder = vg.recipes.generic(tower, BUDGETS, backend="tape", on_miss="error")
    except vg.errors.SpecError as error:
        return Row(name, transformers.__version__, "", "", "", shortened(str(error)))
    asks, outputs = inferred(encoder)
    worst = 0.0
    for seed, items in enumerate(LENGTHS if encoder.spec.layout.name == "feature_lens" else GRIDS):
        rows = rows_for(encoder, items, seed)
        encoder.poison()
        came = encoder(**{encoder.spec.row_input.name: rows, encoder.spec.layout.name: items})
        with torch.no_grad():
            expected = tower(**{encoder.spec.row_input.name: rows, encoder.spec.layout.name: torch.tensor(items)})
        worst = max(worst, distance(came, expected))
    left = "".join(f", {field}: None" for field in expected if field not in came)
    return Row(name, transformers.__version__, asks, outputs + left, f"{worst:.0e}" if worst else "0", "")


def summary(rows: Sequence[Row]) -> str:
    """The table of the page: the towers by result."""
    names: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: (bool(row.reason), row.tower)):
        result = next((words for part, words in REASONS.items() if part in row.reason), row.reason) or "replays"
        names.setdefault(result, []).append(f"`{row.tower}`")
    return table(("result", "towers"), [(result, ", ".join(own)) for result, own in names.items()])


def filled(page: str, rows: Sequence[Row]) -> str:
    """The page with its table."""
    return PLACE.sub(lambda m: f"{m[1]}\n{summary(rows)}\n\n{m[3]}", page)


def main() -> None:
    """Fill the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(TOWERS), help="classes of towers; print, and write nothing")
    options = parser.parse_args()
    rows = []
    for name in options.only:
        if importlib.util.find_spec(f"transformers.models.{TOWERS[name][0]}") is None:
            print(f"transformers {transformers.__version__} has no {name}")
        else:
            rows.append(try_tower(name))
            print(*rows[-1], sep=" | ", flush=True)
    if options.only == list(TOWERS):
        CSV.write_text(csv_text(Row._fields, rows))
        PAGE.write_text(filled(PAGE.read_text(), rows))


if __name__ == "__main__":
    main()
