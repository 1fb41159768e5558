"""Wall milliseconds of towers of other families: eager, an exact graph of the unmodified tower, and graphed.

Run with `python -m benchmarks.families`. Real configurations, random weights, bfloat16, rows and grids on the GPU, a
synchronize on both sides of every call, systems in turn. A system is timed only if it is about as close to a float32
copy of the tower as the tower's own run.

- *eager*: the tower of transformers on FlashAttention 2, one call a layer; of MiniCPM-V vision transformer and
  resampler with the mathematics of those that come with the weights, slices padded to a batch, on sdpa.
- *exact graph*: the same, captured at the exact shape with its metadata computed ahead; the replay alone. Where the
  tower cannot be captured even so, the reason stands in its place.
- *graphed*: the recipe with the default budgets.
"""

import argparse
import copy
import importlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import varlen_graphs as vg
from benchmarks import systems as ways
from benchmarks.common import (
    WrongResultError,
    check,
    distance,
    facts,
    grow_cache,
    headline,
    measure_in_turn,
    reason,
    table,
    write_json,
)


@dataclass(frozen=True)
class Family:
    """A tower of transformers at its real size.

    Attributes:
        package: Where transformers has it.
        config: The class of its configuration.
        tower: Its class.
        recipe: What graphs it.
        sizes: What differs from the defaults of the configuration.
        patch: Pixels a side of a patch.
    """

    package: str
    config: str
    tower: str
    recipe: Callable[..., vg.GraphedEncoder]
    sizes: dict[str, Any] = field(default_factory=dict)
    patch: int = 14


SIGLIP = "SigLIP 2 so400m, NaFlex"

MINICPM = {"MiniCPM-V 2.6": ("2.6", 3584), "MiniCPM-V 4.5": ("4.5", 4096)}
"""Version and width of the language model."""

FAMILIES = {
    "Qwen2-VL-7B": Family(
        "qwen2_vl", "Qwen2VLVisionConfig", "Qwen2VisionTransformerPretrainedModel", vg.recipes.qwen2_vl,
    ),
    "Qwen2.5-VL-7B": Family(
        "qwen2_5_vl", "Qwen2_5_VLVisionConfig", "Qwen2_5_VisionTransformerPretrainedModel", vg.recipes.qwen2_5_vl,
        {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
            "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        },
    ),
    "GLM-4.1V-9B": Family("glm4v", "Glm4vVisionConfig", "Glm4vVisionModel", vg.recipes.glm4v),
}  # fmt: skip

SIDES: dict[str, tuple[int, ...]] = {
    "224x224": (224,),
    "448x448": (448,),
    "4 of 448x448": (448,) * 4,
    "896x896": (896,),
}
"""Square images of each input, by their sides in pixels."""


def main() -> None:
    """Run the benchmark, print it, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*FAMILIES, *MINICPM, SIGLIP]
    parser.add_argument("--families", nargs="+", choices=names, default=names)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    about = facts()
    print(f"{headline(about)}, bfloat16\n")
    result: dict[str, Any] = {**about, "dtype": "bfloat16", "rows": []}
    for name in options.families:
        for row in run(name, options.repeats):
            result["rows"].append({"family": name, **row})
            write_json(options.json, result)
            print(result["rows"][-1], flush=True)
    header = ("family", "input", "rows", "eager_ms", "exact_ms", "graphed_ms", "padding")
    print(table(header, [[row.get(key) for key in header] for row in result["rows"]]))


def run(name: str, repeats: int) -> list[dict[str, Any]]:
    """The rows of a family."""
    if name == SIGLIP:
        return run_siglip(repeats)
    return run_minicpm(*MINICPM[name], repeats) if name in MINICPM else run_family(FAMILIES[name], repeats)


def run_family(family: Family, repeats: int) -> list[dict[str, Any]]:
    """A row for each input."""
    torch.manual_seed(0)
    folder = f"transformers.models.{family.package}"
    config = getattr(importlib.import_module(f"{folder}.configuration_{family.package}"), family.config)(**family.sizes)
    kind = getattr(importlib.import_module(f"{folder}.modeling_{family.package}"), family.tower)
    tower = kind._from_config(config, dtype=torch.bfloat16).cuda().eval()
    reference = copy.deepcopy(tower).float()
    encoder = family.recipe(tower)
    with ways.attention(tower, ways.FLASH2):
        return [run_input(tower, reference, encoder, name, grid_of(family, name), repeats) for name in SIDES]


def grid_of(family: Family, name: str) -> list[tuple[int, int, int]]:
    """The images of an input in patches."""
    return [(1, side // family.patch, side // family.patch) for side in SIDES[name]]


def run_input(
    tower: Any, reference: Any, encoder: vg.GraphedEncoder, name: str, items: list[tuple[int, int, int]], repeats: int
) -> dict[str, Any]:
    """Check and time the systems on one input."""
    grid = torch.tensor(items, device="cuda")
    count = int(grid.prod(-1).sum())
    rows = torch.randn(count, tower.patch_embed.proj.weight[0].numel(), device="cuda", dtype=torch.bfloat16)

    def eager() -> Any:
        with torch.no_grad():
            return tower(rows, grid_thw=grid)

    def graphed() -> Any:
        return encoder(rows, grid_thw=grid)

    def exact() -> Callable[[], Any]:
        arguments = precomputed(tower, grid)
        return lambda: tower(rows, grid_thw=grid, **arguments)

    with torch.no_grad(), ways.attention(reference, "sdpa"):
        expected = tensors(reference(rows.float(), grid_thw=grid))
    return {"input": name, "rows": count, **time_systems(eager, graphed, exact, expected, encoder, count, repeats)}


def time_systems(
    eager: Callable[[], Any],
    graphed: Callable[[], Any],
    exact: Callable[[], Callable[[], Any]],
    expected: list[Tensor],
    encoder: vg.GraphedEncoder,
    count: int,
    repeats: int,
) -> dict[str, Any]:
    """Check and time an eager call, a graphed one, and the exact graph of what `exact` prepares, in turn."""
    eager_error = distance(tensors(eager()), expected)
    error = distance(tensors(graphed()), expected)
    row: dict[str, Any] = {"error": error, "eager_error": eager_error}
    try:
        check(error, eager_error)
    except WrongResultError as failure:
        return row | {"failed": reason(failure)}
    runs = {"eager": eager, "graphed": graphed}
    try:
        runs["exact"] = ways.Replay(exact())
    except Exception as failure:
        row["exact_failed"] = reason(failure)
    grow_cache()
    for run in runs.values():
        run()
    times = measure_in_turn(list(runs.values()), repeats, seconds=4)
    row |= {f"{system}_ms": statistics.median(walls) for system, (walls, _) in zip(runs, times, strict=True)}
    row["padding"] = 1 - count / next(budget.rows for budget in encoder.budgets if budget.rows >= count)
    return row


def run_minicpm(version: str, dim: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each input: vision transformer and resampler at the sizes of a version."""
    from tests.support import minicpm

    vision = {"dim": 1152, "heads": 16, "hidden": 4304, "depth": 27, "patch": 14}
    sizes = {"queries": 64, "dim": dim, "heads": dim // 128, "vision_dim": 1152}
    modules = [module.cuda() for module in minicpm.models(version, 0, vision, sizes)]
    reference = copy.deepcopy(modules)
    vpm, resampler = (module.bfloat16() for module in modules)
    for buffer in ("pos_embed", "temporal_pos_embed"):  # the original keeps them in float32
        if hasattr(resampler, buffer):
            setattr(resampler, buffer, getattr(reference[1], buffer))
    encoder = vg.recipes.minicpmv(vpm, resampler)
    rows = []
    for name, sides in SIDES.items():
        layout = [(side // 14, side // 14) for side in sides]
        slices = [one.cuda() for one in minicpm.slices_of(layout, patch=14)]
        half = [one.bfloat16() for one in slices]
        patches, grid = vg.recipes.pack_slices(half), torch.tensor(layout, device="cuda")
        row = time_systems(
            lambda half=half, layout=layout: minicpm.original(vpm, resampler, half, layout),
            lambda patches=patches, grid=grid: encoder(patches, tgt_sizes=grid),
            lambda half=half, layout=layout: minicpm.blocks(vpm, resampler, half, layout),
            [minicpm.original(*reference, [one.float() for one in half], layout)],
            encoder, len(patches), repeats,
        )  # fmt: skip
        rows.append({"input": name, "rows": len(patches), **row})
    return rows


def run_siglip(repeats: int) -> list[dict[str, Any]]:
    """A row for each input: the vision tower as a padded batch, on sdpa.

    Its exact graph gets the resampled positions, which ask the host, ahead of it, and no mask.
    """
    from transformers.models.siglip2.configuration_siglip2 import Siglip2VisionConfig
    from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionModel

    sizes = {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
        "patch_size": 16, "num_patches": 256,
    }  # fmt: skip
    torch.manual_seed(0)
    tower = Siglip2VisionModel._from_config(Siglip2VisionConfig(**sizes), dtype=torch.bfloat16).cuda().eval()
    reference = copy.deepcopy(tower).float()
    encoder = vg.recipes.siglip2(tower)
    parts = getattr(tower, "vision_model", tower)
    rows = []
    for name, sides in SIDES.items():
        shapes = torch.tensor([(side // 16, side // 16) for side in sides])
        count = int(shapes.prod(-1).sum())
        pixels = torch.randn(len(sides), count // len(sides), 768, device="cuda", dtype=torch.bfloat16)
        mask = torch.ones(pixels.shape[:2], dtype=torch.int64, device="cuda")
        call = {"pixel_attention_mask": mask, "spatial_shapes": shapes}

        def eager(pixels: Tensor = pixels, call: dict[str, Any] = call) -> Any:
            with torch.no_grad():
                return tower(pixels, **call)

        def exact(pixels: Tensor = pixels, shapes: Tensor = shapes) -> Callable[[], Any]:
            own = parts.embeddings
            with torch.no_grad():
                table = own.position_embedding.weight.reshape(
                    own.position_embedding_size, own.position_embedding_size, -1
                )
                positions = own.resize_positional_embeddings(table, shapes, max_length=pixels.shape[1])

            def blocks() -> Any:
                x = own.patch_embedding(pixels) + positions
                x = parts.post_layernorm(parts.encoder(inputs_embeds=x, attention_mask=None).last_hidden_state)
                return parts.head(x, None)

            return blocks

        with torch.no_grad():
            expected = tensors(reference(pixels.float(), **call))
        row = time_systems(
            eager, lambda pixels=pixels, call=call: encoder(pixels, **call), exact, expected, encoder, count, repeats
        )
        rows.append({"input": name, "rows": count, **row})
    return rows


def precomputed(tower: Any, grid: Tensor) -> dict[str, Any]:
    """What the tower computes from the grid on the host, as the arguments that replace it."""
    from transformers.exporters.utils import precompute_export_inputs

    inputs: dict[str, Any] = {"grid_thw": grid}
    precompute_export_inputs(tower, inputs)
    del inputs["grid_thw"]
    return {name: value.cuda() if isinstance(value, Tensor) else value for name, value in inputs.items()}


def tensors(output: Any) -> list[Tensor]:
    """What a language model gets of an output."""
    return [output if isinstance(output, Tensor) else output.pooler_output]


if __name__ == "__main__":
    main()
