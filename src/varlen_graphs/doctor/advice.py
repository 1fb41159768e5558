"""Declarations to paste, for the findings of a diagnosis."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from varlen_graphs.doctor.example_call import ExampleCall, items_in
from varlen_graphs.doctor.findings import Finding
from varlen_graphs.doctor.recognised import pasted, recognise
from varlen_graphs.layouts.arguments import LayoutArgument
from varlen_graphs.layouts.grids import GridHW, GridTHW
from varlen_graphs.layouts.lengths import Lengths
from varlen_graphs.layouts.mask import Mask

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

    The module runs on its calls once more, and may keep what that leaves behind.
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
    found = None if layout is None else recognise(module, examples, rows, name, layout)
    keywords = list(dict.fromkeys(name for finding in findings for name in finding.arguments))
    others = [text for finding in findings if not finding.arguments and (text := finding.declaration)]
    recognised = found.buffers if found is not None else []
    named = {one.name for one in recognised}
    asked = [name for name in keywords if name not in named]
    buffers = [_BY_KEYWORD.get(name, f'vg.buffers.DeviceBuffer("{name}", ...)') for name in asked] + [
        *map(pasted, recognised)
    ]
    others = [] if recognised else others  # which are told by words alone
    layout = layout if found is None else found.layout
    described_by = "..." if layout is None else pasted(layout)
    lines = [
        "vg.BufferSpec(",
        f'    rows="{rows}",',
        f"    layout={described_by},  # the argument that describes the items",
    ]
    if buffers or others:
        lines += [
            "    buffers=[",
            *(f"        {text}," for text in buffers),
            *(f"        ...,  # {text}" for text in dict.fromkeys(others)),
            "    ],",
        ]
    if found is not None:
        lines += [f"    inputs=[{', '.join(found.inputs)}],"] if found.inputs else []
        lines += [f"    outputs={found.outputs},"] if found.outputs else []
    lines.append(")")
    text = "\n".join(f"    {line}" for line in lines)
    takes = ""
    if keywords:
        takes = (
            f"\nThe module takes {', '.join(keywords)} as keyword arguments: vg.recipes.generic(module) declares them "
            "by itself where it knows them all."
        )
    return f"To declare (replace ...):\n\n{text}\n{takes}".rstrip()


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
