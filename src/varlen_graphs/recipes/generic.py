"""Any tower of transformers that takes precomputed tensors: declared by what it asks for, run as it is."""

import math
from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import SpecError, VarlenGraphsError, warn
from varlen_graphs.layout.budgets import Budget, Budgets, Ladder
from varlen_graphs.layout.grids import GridTHW, Lengths
from varlen_graphs.layout.items import Layout
from varlen_graphs.recipes.inspection import RUN_ERRORS, Tower, declare
from varlen_graphs.recipes.precomputed import GATHERED, precomputed
from varlen_graphs.spec.buffer_spec import BufferSpec
from varlen_graphs.spec.outputs import flatten
from varlen_graphs.watch.rules_mode import CaptureRulesMode


def generic(tower: Any, budgets: Budgets | None = None, **options: Any) -> GraphedEncoder:
    """Graph a vision or audio tower of transformers 5.15 or newer that no recipe is for.

    Such a tower takes as keyword arguments what follows from its grid: `cu_seqlens`, `position_ids` and the like. This
    runs it on a few small layouts, sees what it asks for and with which settings, declares buffers for that and what
    its outputs have entries for, and puts our attention in the place of the tower's. What is captured is the tower's
    own forward, so nothing in it is fused as recipes do it.

    The encoder takes what the tower takes, its first argument and `grid_thw`, `image_grid_thw` or `feature_lens`, and
    gives what it gives. A field whose size follows from neither rows nor items, such as the first row of a call, comes
    as `None`, and a warning names it.

    The runs are of some hundred random rows, on the device of the tower, and sync with the host. The last ones, with
    buffers, are compared with the first, without.

    Args:
        tower: The tower, in the dtype and on the device that it is to be run in.
        budgets: As for `GraphedEncoder`; `None` is `Ladder()`, for audio with room for `max(4, rows // 512)` clips.
        **options: Further arguments of `GraphedEncoder`.

    Raises:
        SpecError: The tower asks for something that no buffer is for, does what a graph cannot hold, or gives something
            else with buffers than without. The message names the argument or the line.
    """
    try:
        spec, forward = _declare(tower)
    except (VarlenGraphsError, *RUN_ERRORS) as error:
        name = type(tower).__name__
        raise SpecError(
            f"{name} needs a recipe: {error}\nTo write one for it, or to declare its arguments, see docs/recipes.md"
        ) from error
    if budgets is None:
        clips = isinstance(spec.layout, Lengths)
        budgets = [Budget(rows, items=max(4, rows // 512)) for rows in Ladder().row_counts()] if clips else Ladder()
        if spec.needs.windows:  # a segment for every quarter of one: enough for sides of at least half a window
            budgets = Ladder(rows_per_segment=max(1, (spec.needs.windows.side * spec.layout.merge) ** 2 // 4))
    return GraphedEncoder(tower, budgets, spec, forward=forward, **options)


def _declare(module: nn.Module) -> tuple[BufferSpec, Callable[..., Any]]:
    """What a tower's arguments and outputs are, and its forward on our attention.

    Raises:
        SpecError, CaptureError: It cannot be graphed so.
    """
    tower = Tower(module)
    packed, calls = tower.inspect(_layouts(tower, merge=6)[0])
    if not calls:
        raise SpecError("it asks for no precomputed tensors; towers do from transformers 5.15 on")
    found = precomputed(module, calls)
    layouts = _layouts(tower, found.merge)
    expected = [tower.run(packed, layout) for layout in layouts]
    outputs, left = declare(expected, layouts, found.outputs)

    def forward(module: nn.Module, **arguments: Any) -> Any:
        from varlen_graphs.attention.transformers import use_attention

        for name in arguments.keys() & GATHERED:
            arguments[name] = _gather(arguments[tower.rows], *arguments[name])
        with use_attention(module):
            return _without(tower.forward(**arguments), left)

    def watched(module: nn.Module, **arguments: Any) -> Any:
        with CaptureRulesMode(next(module.parameters()).device, "it"):
            return forward(module, **arguments)

    layout = Lengths(tower.layout) if tower.is_audio else GridTHW(tower.layout, merge=found.merge)
    spec = BufferSpec(rows=packed, layout=layout, buffers=found.buffers, outputs=outputs)
    encoder = GraphedEncoder(module, [1024], spec, forward=watched, backend="eager")
    for items, output in zip(layouts, expected, strict=True):
        came = encoder.eager(tower.example(packed, items), **{tower.layout: tower.describe(items)})
        _compare(flatten(came, outputs).tensors, flatten(_without(output, left), outputs).tensors, items)
    if left:
        warn(f"{type(module).__name__} gives {left}, which belong to no row or item: the encoder gives None")
    return spec, forward


def _layouts(tower: Tower, merge: int) -> list[Layout]:
    """What to run a tower on: one item, several, and several videos; or clips shorter than a chunk, and longer ones."""
    m = merge
    grids = [[(1, 2 * m, 2 * m)], [(1, 2 * m, 4 * m), (1, 4 * m, 2 * m), (1, 2 * m, 2 * m)]]
    grids.append([(2, 2 * m, 2 * m), (2, 4 * m, 2 * m)])
    clips = [[(1, 1, 40)], [(1, 1, 7), (1, 1, 33)], [(1, 1, 7), (1, 1, 650), (1, 1, 33)]]
    return [Layout(tuple(items)) for items in (clips if tower.is_audio else grids)]


def _without(output: Any, left: list[str]) -> Any:
    """An output with `None` in the place of some fields."""
    return type(output)(**{name: part for name, part in output.items() if name not in left}) if left else output


def _gather(rows: Tensor, places: Tensor, real: Tensor) -> Tensor:
    """Rows `[dim, rows]` in places `[chunks, chunk]`, as `[chunks, dim, chunk]`; 0 where there is none."""
    return rearrange(torch.where(real, rows[:, places], 0), "dim chunks rows -> chunks dim rows")


def _compare(came: list[Tensor], expected: list[Tensor], layout: Layout) -> None:
    """Whether a tower gives with buffers what it gives without, but for rounding.

    Raises:
        SpecError: It does not.
    """
    for a, b in zip(came, expected, strict=True):
        error = ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()
        if not error <= math.sqrt(torch.finfo(b.dtype).eps):
            raise SpecError(
                f"with buffers its output for the items {layout.items} is another one (relative L2 {error:.1e}), so "
                "more in it depends on them than it asks for"
            )
