"""Declarations to paste, for the findings of a diagnosis."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from varlen_graphs.doctor.example_call import ExampleCall, items_in
from varlen_graphs.doctor.findings import Finding

RECIPE_NAMES: dict[str, str] = {}
"""Names of recipes by the class of their towers; the recipes register themselves."""

_BY_KEYWORD = {
    "cu_seqlens": 'vg.buffers.CuSeqlens("cu_seqlens", per="frame")',
    "cu_window_seqlens": 'vg.buffers.CuSeqlens("cu_window_seqlens", per=vg.layouts.Windows(side))',
    "interp_indices": 'vg.buffers.InterpolationIndices("interp_indices", ...)',
    "interp_weights": 'vg.buffers.InterpolationWeights("interp_weights", ...)',
    "max_seqlen": 'vg.buffers.MaxSeqlen("max_seqlen", per="frame")',
    "max_window_seqlen": 'vg.buffers.MaxSeqlen("max_window_seqlen", per=vg.layouts.Windows(side))',
    "position_ids": 'vg.buffers.GridPositions("position_ids", order=...)',
    "window_index": 'vg.buffers.WindowIndex(vg.layouts.Windows(side), "window_index")',
}
"""Declarations of the tensors that towers of transformers take precomputed."""


def summary(module: nn.Module, example: ExampleCall, findings: Sequence[Finding]) -> str:
    """Return a declaration to paste, or the recipe that has it; empty if nothing prevents a correct graph."""
    if not any(finding.blocks for finding in findings):
        return ""
    recipe = next((RECIPE_NAMES[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in RECIPE_NAMES), None)
    if recipe:
        return f"A recipe declares all this: vg.recipes.{recipe}(module), or vg.wrap(model) for the whole model."
    given = named_tensors(module, example)
    if not given:
        return ""
    rows = max(given, key=lambda name: given[name].numel())
    described = {name: own for name, value in _bound(module, example).items() if (own := items_in(value)) is not None}
    layout = next((text for name, own in {**described, **given}.items() if (text := _layout(name, own, rows))), None)
    keywords = list(dict.fromkeys(name for finding in findings for name in finding.arguments))
    others = [text for finding in findings if not finding.arguments and (text := finding.declaration)]
    buffers = [_BY_KEYWORD.get(name, f'vg.buffers.DeviceBuffer("{name}", ...)') for name in keywords]
    lines = [
        "vg.BufferSpec(",
        f'    rows="{rows}",',
        f"    layout={layout or '...'},  # the argument that describes the items",
    ]
    if buffers or others:
        lines += [
            "    buffers=[",
            *(f"        {text}," for text in buffers),
            *(f"        ...,  # {text}" for text in dict.fromkeys(others)),
            "    ],",
        ]
    lines.append(")")
    pasted = "\n".join(f"    {line}" for line in lines)
    takes = ""
    if keywords:
        takes = (
            f"\nThe module takes {', '.join(keywords)} as keyword arguments: vg.recipes.generic(module) declares them "
            "by itself where it knows them all."
        )
    return f"To declare (replace ...):\n\n{pasted}\n{takes}".rstrip()


def named_tensors(module: nn.Module, example: ExampleCall) -> Mapping[str, Tensor]:
    """Return the tensors of a call by the names of their arguments."""
    return {name: value for name, value in _bound(module, example).items() if isinstance(value, Tensor)}


def _bound(module: nn.Module, example: ExampleCall) -> Mapping[str, Any]:
    """Return the arguments of a call by name."""
    try:
        return inspect.signature(module.forward).bind_partial(*example.args, **example.kwargs).arguments
    except (TypeError, ValueError):
        return example.kwargs


def _layout(name: str, tensor: Tensor, rows: str) -> str | None:
    if name == rows or tensor.is_floating_point() or tensor.is_nested:
        return None
    if tensor.dim() == 2 and tensor.shape[1] in (2, 3):
        return f'vg.{"layouts.GridHW" if tensor.shape[1] == 2 else "GridTHW"}("{name}")'
    if tensor.dim() == 2 and "mask" in name:
        return f'vg.Mask("{name}")'
    if tensor.dim() == 1 and "cu_" not in name:
        return f'vg.Lengths("{name}")'
    return None
