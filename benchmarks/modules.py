"""Wall milliseconds of modules from elsewhere that `vg.wrap` understands by their first call: eager, compiled, wrapped.

Run with `python -m benchmarks.modules`. Diffusion transformers of diffusers, one step at three resolutions, and towers
of timm, at three batch sizes; real sizes, random weights, bfloat16, a synchronize on both sides of every call, systems
in turn. A system is timed only if its output is close to that of the module itself.

- *eager*: the module itself.
- *compiled*: `torch.compile(module)`, which compiles for the first input, and for inputs of any size at the second.
- *blocks*: the repeated blocks compiled alone, `compile_repeated_blocks()`, which diffusers documents.
- *wrapped*: `vg.wrap(module)`.
- *fused*: `vg.wrap(module, capture=vg.options.Capture(compile=True))`.

`start_s` are the seconds from nothing until each input was answered twice, captures and compilations included.
"""

import argparse
import importlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import varlen_graphs as vg
from benchmarks.common import WrongResultError, check, distance, grow_cache, measure_in_turn, reason, report

Call = tuple[tuple[Any, ...], dict[str, Any]]

SYSTEMS = ("eager", "compiled", "blocks", "wrapped", "fused")

ROUNDING = 2e-2
"""Relative L2 between two right runs of a deep module in bfloat16: the largest have no room for a copy in float32."""

SIDES = {"512x512": (512, 512), "768x1024": (768, 1024), "1024x1024": (1024, 1024)}
"""Pixels of an image; latents have an eighth."""

BATCHES = (1, 4, 16)


class Module(NamedTuple):
    """A module, and its calls by the names of their inputs."""

    make: Callable[[], nn.Module]
    calls: Callable[[], dict[str, Call]]


def noise(*shape: int) -> Tensor:
    """Random numbers on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def diffusers(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    """What makes a transformer of diffusers."""
    return lambda: getattr(importlib.import_module("diffusers"), kind)(**sizes)


def timm(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    """What makes a tower of timm that returns features."""
    return lambda: importlib.import_module("timm").create_model(name, pretrained=False, num_classes=0, **sizes)


def flux() -> dict[str, Call]:
    """A step of Flux for one image."""
    calls: dict[str, Call] = {}
    for name, (height, width) in SIDES.items():
        rows, columns = height // 16, width // 16
        places = torch.zeros(rows * columns, 3, device="cuda", dtype=torch.bfloat16)
        places[:, 1:] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        calls[name] = (noise(1, rows * columns, 64),), {
            "encoder_hidden_states": noise(1, 512, 4096), "pooled_projections": noise(1, 768),
            "timestep": noise(1).abs(), "guidance": torch.full((1,), 3.5, device="cuda", dtype=torch.bfloat16),
            "img_ids": places, "txt_ids": torch.zeros(512, 3, device="cuda", dtype=torch.bfloat16),
            "return_dict": False,
        }  # fmt: skip
    return calls


def latents(channels: int, **more: Callable[[], Any]) -> Callable[[], dict[str, Call]]:
    """A step of one image with guidance: two latents, and the other arguments."""

    def calls() -> dict[str, Call]:
        return {
            name: (
                (noise(2, channels, height // 8, width // 8),),
                {argument: value() for argument, value in more.items()}
                | {"timestep": torch.full((2,), 500, device="cuda"), "return_dict": False},
            )
            for name, (height, width) in SIDES.items()
        }

    return calls


def images(side: int) -> Callable[[], dict[str, Call]]:
    """Batches of images of one size."""
    return lambda: {f"{batch} of {side}x{side}": ((noise(batch, 3, side, side),), {}) for batch in BATCHES}


MODULES = {
    "PixArt-Sigma": Module(
        diffusers(
            "PixArtTransformer2DModel", num_attention_heads=16, attention_head_dim=72, in_channels=4, out_channels=8,
            num_layers=28, cross_attention_dim=1152, sample_size=128, patch_size=2, caption_channels=4096,
            use_additional_conditions=False,
        ),
        latents(
            4, encoder_hidden_states=lambda: noise(2, 300, 4096),
            added_cond_kwargs=lambda: {"resolution": None, "aspect_ratio": None},
        ),
    ),
    "Stable Diffusion 3 medium": Module(
        diffusers(
            "SD3Transformer2DModel", sample_size=128, patch_size=2, in_channels=16, num_layers=24,
            attention_head_dim=64, num_attention_heads=24, joint_attention_dim=4096, caption_projection_dim=1536,
            pooled_projection_dim=2048, out_channels=16, pos_embed_max_size=192,
        ),
        latents(
            16, encoder_hidden_states=lambda: noise(2, 333, 4096), pooled_projections=lambda: noise(2, 2048)
        ),
    ),
    "Flux.1 dev": Module(
        diffusers(
            "FluxTransformer2DModel", patch_size=1, in_channels=64, num_layers=19, num_single_layers=38,
            attention_head_dim=128, num_attention_heads=24, joint_attention_dim=4096, pooled_projection_dim=768,
            guidance_embeds=True,
        ),
        flux,
    ),
    "timm ViT-L/16": Module(timm("vit_large_patch16_224"), images(224)),
    "timm SigLIP so400m/14": Module(timm("vit_so400m_patch14_siglip_384"), images(384)),
}  # fmt: skip


def main() -> None:
    """Run the benchmark, print it, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", nargs="+", choices=MODULES, default=list(MODULES), metavar="MODULE")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS, metavar="SYSTEM")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    systems = ["eager", *(one for one in options.systems if one != "eager")]
    rows = ({"module": name, **row} for name in options.modules for row in run(MODULES[name], systems, options.repeats))
    report(rows, ("module", "input", *(f"{system}_ms" for system in SYSTEMS)), options.json)


@torch.no_grad()
def run(module: Module, systems: list[str], repeats: int) -> list[dict[str, Any]]:
    """A row for each input of a module."""
    torch.manual_seed(0)
    calls = module.calls()
    ready: dict[str, nn.Module] = {}
    starts: dict[str, float] = {}
    failures: dict[str, str] = {}
    own = made(module)
    for system in systems:
        one = own if system == "eager" else made(module)
        one.load_state_dict(own.state_dict(), assign=True)  # all share the weights
        torch.cuda.synchronize()
        start = time.perf_counter()
        try:
            prepared = prepare(system, one)
            for args, kwargs in [*calls.values()] * 2:
                prepared(*args, **kwargs)
        except Exception as failure:
            failures[f"{system}_failed"] = reason(failure)
            continue
        torch.cuda.synchronize()
        ready[system], starts[f"{system}_start_s"] = prepared, time.perf_counter() - start
    return [{"input": name, **timed(ready, *call, repeats), **starts, **failures} for name, call in calls.items()]


def made(module: Module) -> nn.Module:
    """The module on the GPU, made there."""
    with torch.device("cuda"):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            one = module.make().eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(before)
    for parameter in one.parameters():  # some begin as zeros, with which all outputs are equal
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return one


def prepare(system: str, module: nn.Module) -> Any:
    """What answers calls of a module."""
    if system == "compiled":
        return torch.compile(module)
    if system == "blocks":
        module.compile_repeated_blocks()  # type: ignore[operator]
    elif system != "eager":
        vg.wrap(module, capture=vg.options.Capture(compile=system == "fused"))
    return module


def timed(ready: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Check and time all systems on one input, in turn."""
    expected = first(ready["eager"](*args, **kwargs))
    row: dict[str, Any] = {}
    right: dict[str, Callable[[], Any]] = {}
    for system, module in ready.items():
        row[f"{system}_error"] = error = distance([first(module(*args, **kwargs))], [expected])
        try:
            check(error, ROUNDING)
        except WrongResultError as failure:
            row[f"{system}_failed"] = reason(failure)
        else:
            right[system] = lambda module=module: module(*args, **kwargs)
    grow_cache()
    for one in right.values():
        one()
    times = measure_in_turn(list(right.values()), repeats, seconds=6)
    return row | {f"{system}_ms": statistics.median(walls) for system, (walls, _) in zip(right, times, strict=True)}


def first(output: Any) -> Tensor:
    """The tensor of an output."""
    tensor: Tensor = output if isinstance(output, Tensor) else output[0]
    return tensor


if __name__ == "__main__":
    main()
