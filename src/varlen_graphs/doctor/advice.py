"""Declarations to paste, for the findings of a diagnosis."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

from torch import Tensor, nn

from varlen_graphs.doctor.example_call import ExampleCall, items_in
from varlen_graphs.doctor.findings import Finding
from varlen_graphs.doctor.recognised import Recognised, pasted, recognise
from varlen_graphs.layouts.arguments import LayoutArgument
from varlen_graphs.layouts.grids import GridHW, GridTHW
from varlen_graphs.layouts.lengths import Lengths
from varlen_graphs.layouts.mask import Mask
from varlen_graphs.outputs.entries import Rows

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


def summary(module: nn.Module, examples: Sequence[ExampleCall], findings: Sequence[Finding]) -> str:
    """Return a declaration to paste, or the recipe that has it; empty if nothing prevents a correct graph.

    The module runs twice more on each call, and may keep what that leaves behind.
    """
    if not any(finding.blocks for finding in findings):
        return ""
    recipe = next((RECIPE_NAMES[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in RECIPE_NAMES), None)
    if recipe:
        return f"A recipe declares all this: vg.recipes.{recipe}(module), or vg.wrap(model) for the whole model."
    example = examples[0]
    given = named_tensors(module, example)
    if not given:
        return ""
    rows = max(given, key=lambda name: given[name].numel())
    described = {name: own for name, value in example.named(module).items() if (own := items_in(value)) is not None}
    layouts = ((name, one) for name, own in {**described, **given}.items() if (one := _layout(name, own, rows)))
    name, layout = next(layouts, ("", None))
    found = Recognised(layout, [], [], None)
    if layout is not None:
        with suppress(Exception):  # of the module's own code, or of items that are not those of the rows
            found = recognise(module, examples, rows, name, layout)
    keywords = list(dict.fromkeys(name for finding in findings for name in finding.arguments))
    named = {one.name for one in found.buffers}
    buffers = [
        _BY_KEYWORD.get(name, f'vg.buffers.DeviceBuffer("{name}", ...)') for name in keywords if name not in named
    ]
    buffers += map(pasted, found.buffers)
    kinds = {type(one).__name__ for one in found.buffers}
    kinds |= {"CuSeqlens"} if "AttentionMask" in kinds else set()  # either tells attention what belongs together
    words = (text for finding in findings if not finding.arguments and (text := finding.declaration))
    others = [text for text in dict.fromkeys(words) if not kinds.intersection(re.findall(r"\w+", text))]
    described_by = "..." if found.layout is None else pasted(found.layout)
    lines = [f'    rows="{rows}",', f"    layout={described_by},  # the argument that describes the items"]
    if buffers or others:
        lines += [
            "    buffers=[",
            *(f"        {text}," for text in buffers),
            *(f"        ...,  # {text}" for text in others),
            "    ],",
        ]
    if found.inputs:
        lines.append(f"    inputs=[{', '.join(map(pasted, found.inputs))}],")
    if found.outputs is None:
        lines.append("    outputs=...,")
    elif found.outputs != Rows():
        lines.append(f"    outputs={pasted(found.outputs)},")
    text = "\n".join(f"    {line}" for line in ["vg.BufferSpec(", *lines, ")"])
    takes = ""
    if keywords:
        takes = (
            f"\nThe module takes {', '.join(keywords)} as keyword arguments: vg.recipes.generic(module) declares them "
            "by itself where it knows them all."
        )
    return f"To declare{' (replace ...)' if '...' in text else ''}:\n\n{text}\n{takes}".rstrip()


def named_tensors(module: nn.Module, example: ExampleCall) -> Mapping[str, Tensor]:
    """Return the tensors of a call by the names of their arguments."""
    return {name: value for name, value in example.named(module).items() if isinstance(value, Tensor)}


def _layout(name: str, tensor: Tensor, rows: str) -> LayoutArgument | None:
    if name == rows or tensor.is_floating_point() or tensor.is_nested:
        return None
    if tensor.dim() == 2 and tensor.shape[1] in (2, 3):
        return GridHW(name) if tensor.shape[1] == 2 else GridTHW(name)
    if tensor.dim() == 2 and "mask" in name:
        return Mask(name)
    if tensor.dim() == 1 and "cu_" not in name:
        return Lengths(name)
    return None
