"""Wall milliseconds of towers of other families: eager, an exact graph of the unmodified tower, and graphed.

Run with `python -m benchmarks.families`. Real configurations, random weights, bfloat16, rows and grids on the GPU, a
synchronize on both sides of every call, systems in turn. A system is timed only if it is about as close to a float32
copy of the tower as the tower's own run.

- *eager*: the tower of transformers on FlashAttention 2, one call a layer; of MiniCPM-V vision transformer and
  resampler with the mathematics of those that come with the weights, slices padded to a batch, on sdpa.
- *exact graph*: the same, captured at the exact shape with its metadata computed ahead; the replay alone. Where the
  tower cannot be captured even so, the reason stands in its place.
- *graphed*: the recipe.
- *automatic*: `vg.recipes.generic` or `vg.recipes.by_batch`, which is what `vg.wrap` would do without the recipe. Where
  it refuses the tower, the reason stands in its place.

Both have the default budgets that the inputs need.
"""

import argparse
import copy
import importlib
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import varlen_graphs as vg
from benchmarks import systems as ways
from benchmarks.common import WrongResultError, check, distance, grow_cache, measure_in_turn, reason, report


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

TILES = {
    "SmolVLM-500M": ("smolvlm", "SmolVLMVisionConfig", "SmolVLMVisionTransformer", {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "image_size": 512, "patch_size": 16,
    }),
    "Idefics3-8B": ("idefics3", "Idefics3VisionConfig", "Idefics3VisionTransformer", {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
        "image_size": 364, "patch_size": 14,
    }),
}  # fmt: skip
"""Towers of tiles of one size: package, configuration, class and sizes."""

TILE_COUNTS = (1, 5, 13)
"""Tiles of an image that is not split, and of two that are."""

MINICPM = {"MiniCPM-V 2.6": ("2.6", 3584), "MiniCPM-V 4.5": ("4.5", 4096)}
"""Version and width of the language model."""

FAMILIES = {
    "Qwen3-VL-8B": Family(
        "qwen3_vl", "Qwen3VLVisionConfig", "Qwen3VLVisionModel", vg.recipes.qwen3_vl, {"out_hidden_size": 4096}, 16,
    ),
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
    names = [*FAMILIES, *TILES, *MINICPM, SIGLIP]
    parser.add_argument("--families", nargs="+", choices=names, default=names)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    rows = ({"family": name, **row} for name in options.families for row in run(name, options.repeats))
    times = "eager_ms", "exact_ms", "automatic_ms", "graphed_ms"
    report(rows, ("family", "input", "rows", *times, "padding"), options.json)


def run(name: str, repeats: int) -> list[dict[str, Any]]:
    """The rows of a family."""
    if name == SIGLIP:
        return run_siglip(repeats)
    if name in TILES:
        return run_tiles(*TILES[name], repeats)
    return run_minicpm(*MINICPM[name], repeats) if name in MINICPM else run_family(FAMILIES[name], repeats)


def run_family(family: Family, repeats: int) -> list[dict[str, Any]]:
    """A row for each input."""
    torch.manual_seed(0)
    folder = f"transformers.models.{family.package}"
    config = getattr(importlib.import_module(f"{folder}.configuration_{family.package}"), family.config)(**family.sizes)
    kind = getattr(importlib.import_module(f"{folder}.modeling_{family.package}"), family.tower)
    tower = kind._from_config(config, dtype=torch.bfloat16).cuda().eval()
    reference = copy.deepcopy(tower).float()
    grids = {name: grid_of(family, name) for name in SIDES}
    budgets = needed([sum(h * w for _, h, w in grid) for grid in grids.values()])
    encoder, automatic = family.recipe(tower, budgets), understood(vg.recipes.generic, tower, budgets)
    with ways.attention(tower, ways.FLASH2):
        return [run_input(tower, reference, encoder, automatic, name, grids[name], repeats) for name in SIDES]


def needed(counts: Iterable[int]) -> list[int]:
    """The default budgets that calls of so many rows need."""
    ladder = vg.budgets.Ladder().row_counts()
    return sorted({next(rows for rows in ladder if rows >= count) for count in counts})


def understood(recipe: Callable[..., vg.GraphedEncoder], tower: Any, budgets: Any) -> vg.GraphedEncoder | str:
    """An encoder of the automatic path, or why it refuses the tower."""
    try:
        return recipe(tower, budgets)
    except vg.errors.SpecError as refused:
        return reason(refused)


def grid_of(family: Family, name: str) -> list[tuple[int, int, int]]:
    """The images of an input in patches."""
    return [(1, side // family.patch, side // family.patch) for side in SIDES[name]]


def run_input(
    tower: Any, reference: Any, encoder: vg.GraphedEncoder, automatic: vg.GraphedEncoder | str, name: str,
    items: list[tuple[int, int, int]], repeats: int,
) -> dict[str, Any]:  # fmt: skip
    """Check and time the systems on one input."""
    grid = torch.tensor(items, device="cuda")
    count = int(grid.prod(-1).sum())
    rows = torch.randn(count, tower.patch_embed.proj.weight[0].numel(), device="cuda", dtype=torch.bfloat16)

    def eager() -> Any:
        with torch.no_grad():
            return tower(rows, grid_thw=grid)

    def exact() -> Callable[[], Any]:
        arguments = precomputed(tower, grid)
        return lambda: tower(rows, grid_thw=grid, **arguments)

    with torch.no_grad(), ways.attention(reference, "sdpa"):
        expected = tensors(reference(rows.float(), grid_thw=grid))
    graphs = {"graphed": lambda: encoder(rows, grid_thw=grid)}
    failures = {"automatic_failed": automatic} if isinstance(automatic, str) else {}
    if not isinstance(automatic, str):
        graphs["automatic"] = lambda: automatic(rows, grid_thw=grid)
    times = time_systems(eager, graphs, exact, expected, encoder, count, repeats)
    return {"input": name, "rows": count, **failures, **times}


def time_systems(
    eager: Callable[[], Any],
    graphs: Mapping[str, Callable[[], Any]],
    exact: Callable[[], Callable[[], Any]],
    expected: list[Tensor],
    encoder: vg.GraphedEncoder,
    count: int,
    repeats: int,
) -> dict[str, Any]:
    """Check and time an eager call, those of encoders, and the exact graph of what `exact` prepares, in turn."""
    eager_error = distance(tensors(eager()), expected)
    errors = {system: distance(tensors(run()), expected) for system, run in graphs.items()}
    row: dict[str, Any] = {"error": max(errors.values()), "eager_error": eager_error}
    try:
        check(row["error"], eager_error)
    except WrongResultError as failure:
        return row | {"failed": reason(failure)}
    runs = {"eager": eager, **graphs}
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
    budgets = needed([sum((side // 14) ** 2 for side in sides) for sides in SIDES.values()])
    encoder = vg.recipes.minicpmv(vpm, resampler, budgets)
    rows = []
    for name, sides in SIDES.items():
        layout = [(side // 14, side // 14) for side in sides]
        slices = [one.cuda() for one in minicpm.slices_of(layout, patch=14)]
        half = [one.bfloat16() for one in slices]
        patches, grid = vg.recipes.pack_slices(half), torch.tensor(layout, device="cuda")
        row = time_systems(
            lambda half=half, layout=layout: minicpm.original(vpm, resampler, half, layout),
            {"graphed": lambda patches=patches, grid=grid: encoder(patches, tgt_sizes=grid)},
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
    encoder = vg.recipes.siglip2(tower, needed([sum((side // 16) ** 2 for side in sides) for sides in SIDES.values()]))
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
            eager, {"graphed": lambda pixels=pixels, call=call: encoder(pixels, **call)}, exact, expected, encoder,
            count, repeats,
        )  # fmt: skip
        rows.append({"input": name, "rows": count, **row})
    return rows


def run_tiles(package: str, config: str, kind: str, sizes: dict[str, Any], repeats: int) -> list[dict[str, Any]]:
    """A row for each number of tiles, on sdpa."""
    folder = f"transformers.models.{package}"
    torch.manual_seed(0)
    settings = getattr(importlib.import_module(f"{folder}.configuration_{package}"), config)(**sizes)
    model = getattr(importlib.import_module(f"{folder}.modeling_{package}"), kind)
    tower = model._from_config(settings, dtype=torch.bfloat16).cuda().eval()
    reference = copy.deepcopy(tower).float()
    patches = (settings.image_size // settings.patch_size) ** 2
    encoder = vg.recipes.idefics(tower, needed([count * patches for count in TILE_COUNTS]))
    automatic = vg.recipes.by_batch(tower)
    rows = []
    for count in TILE_COUNTS:
        pixels = torch.randn(count, 3, *[settings.image_size] * 2, device="cuda", dtype=torch.bfloat16)

        def eager(pixels: Tensor = pixels) -> Any:
            with torch.no_grad():
                return tower(pixels)

        def exact(eager: Callable[[], Any] = eager) -> Callable[[], Any]:
            return eager

        with torch.no_grad():
            expected = [reference(pixels.float()).last_hidden_state]
        graphs = {
            "graphed": lambda pixels=pixels: encoder(pixels),
            "automatic": lambda pixels=pixels: automatic(pixels),
        }
        row = time_systems(eager, graphs, exact, expected, encoder, count * patches, repeats)
        rows.append({"input": f"{count} tiles", "rows": count * patches, **row})
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
    if isinstance(output, Tensor):
        return [output]
    return [output.last_hidden_state if output.get("pooler_output") is None else output.pooler_output]


if __name__ == "__main__":
    main()
