"""From decoded images to features: a processor and the eager tower, the same with graphs, and `encoder.from_images`.

Run with `python -m benchmarks.pixels`. The tower of Qwen3-VL in bfloat16 with random weights, and the processor of
Qwen2-VL that works with PIL. Milliseconds of a call, the systems in turn. `resize_ms` is what `read_images` takes on
the host, `resize_there_ms` on the GPU, from pictures of PIL; `on_gpu_ms` is `from_images` of images that are on the
GPU, and `tower_ms` the call of the graphs alone, with bytes. Errors are relative L2 to the processor with a float32
copy of the tower: that of the eager tower, and of `from_images`. Bytes resized on the GPU are those of the host, which
is checked.
"""

import argparse
import copy
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.functional import interpolate

import varlen_graphs as vg
from benchmarks.common import check, distance, facts, headline, measure_in_turn, summary, table, write_json
from benchmarks.systems import make_tower, tensors

IMAGES = {
    "640 x 480": [(480, 640)],
    "1280 x 960": [(960, 1280)],
    "1920 x 1080": [(1080, 1920)],
    "8 of 640 x 480": [(480, 640)] * 8,
    "page, 1240 x 1754": [(1754, 1240)],
    "4000 x 3000 to 2 megapixels": [(3000, 4000)],
}
"""Heights and widths of the images of a call."""


def make_processor(most: int = 16777216) -> Any:
    """The image processor of Qwen3-VL, as its configuration on the hub has it, or for images of fewer pixels."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    half = [0.5] * 3
    size = {"shortest_edge": 65536, "longest_edge": most}
    return Qwen2VLImageProcessorPil(patch_size=16, image_mean=half, image_std=half, size=size)


def make_image(height: int, width: int, seed: int = 0) -> Any:
    """Return a picture of PIL, as smooth as a photograph."""
    from PIL import Image

    noise = torch.rand(1, 3, height // 16, width // 16, generator=torch.Generator().manual_seed(seed))
    pixels = interpolate(noise, (height, width), mode="bicubic").clamp(0, 1)[0].permute(1, 2, 0)
    return Image.fromarray((pixels * 255).byte().numpy())


def main() -> None:
    """Run the benchmark, print it, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["2b", "8b"], default="8b")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {**facts(), "size": options.size, "rows": []}
    tower = make_tower(options.size, torch.bfloat16)
    reference = copy.deepcopy(tower).float()
    graphs = vg.recipes.qwen3_vl(tower)
    processors = [make_processor(), make_processor(2**21)]
    encoders = [vg.recipes.qwen3_vl(tower, normalize=vg.inputs.Patches.of(one)) for one in processors]
    for name, sizes in IMAGES.items():
        smaller = name.endswith("megapixels")
        processor, pixels = processors[smaller], encoders[smaller]
        images = [make_image(*size, seed) for seed, size in enumerate(sizes)]
        result["rows"].append(
            {"images": name, **compare(tower, reference, graphs, pixels, processor, images, options.repeats)}
        )
        write_json(options.json, result)
    print(headline(result))
    header = (
        "images", "patches", "resize_ms", "resize_there_ms", "processor_ms", "eager_ms", "graphs_ms", "from_images_ms",
        "on_gpu_ms", "tower_ms", "eager_error", "error",
    )  # fmt: skip
    print(table(header, [[row[key] for key in header] for row in result["rows"]]))


def compare(
    tower: Any,
    reference: Any,
    graphs: vg.GraphedEncoder,
    pixels: vg.GraphedEncoder,
    processor: Any,
    images: list[Any],
    repeats: int,
) -> dict[str, Any]:
    """Check and time the systems on the same images."""

    def process() -> tuple[Tensor, Tensor]:
        made = processor(images, return_tensors="pt")
        return made["pixel_values"], made["image_grid_thw"]

    def eager() -> Any:
        rows, grid = process()
        return tower(rows.to("cuda", torch.bfloat16), grid_thw=grid.to("cuda"))

    def graphed() -> Any:
        rows, grid = process()
        return graphs(rows.to("cuda", torch.bfloat16), grid_thw=grid)

    def from_images() -> Any:
        return pixels.from_images(images)

    there = [torch.tensor(numpy.asarray(image), device="cuda") for image in images]
    call = pixels.read_images(images, "cuda")
    for name, made in pixels.read_images(images).items():
        assert torch.equal(call[name].cpu(), made), name  # noqa: S101

    def on_gpu() -> Any:
        return pixels.from_images(there)

    def alone() -> Any:
        return pixels(**call)

    runs: dict[str, Callable[[], Any]] = {
        "resize": lambda: pixels.read_images(images),
        "resize_there": lambda: pixels.read_images(images, "cuda"),
        "processor": process,
        "eager": eager,
        "graphs": graphed,
        "from_images": from_images,
        "on_gpu": on_gpu,
        "tower": alone,
    }
    with torch.inference_mode():
        rows, grid = process()
        expected = tensors(reference(rows.cuda(), grid_thw=grid.cuda()))
        eager_error = distance(tensors(eager()), expected)
        errors = [distance(tensors(run()), expected) for run in (graphed, from_images, on_gpu)]
        for error in errors:
            check(error, eager_error)
        measured = measure_in_turn([*runs.values()], repeats, seconds=20.0)
    times = {name: summary(*one) for name, one in zip(runs, measured, strict=True)}
    medians = {f"{name}_ms": statistics.median(walls) for name, (walls, _) in zip(runs, measured, strict=True)}
    return {"patches": len(rows), **medians, "eager_error": eager_error, "error": max(errors[1:]), "times": times}


if __name__ == "__main__":
    main()
