"""Any tower of transformers that takes precomputed tensors: declared by what it asks for, run as it is."""

import math
import warnings
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from varlen_graphs.budgets import Budget, Budgets, Ladder
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import SpecError
from varlen_graphs.layout import GridTHW, Layout, Lengths
from varlen_graphs.outputs import flatten
from varlen_graphs.recipes.inspection import Tower, declare
from varlen_graphs.recipes.precomputed import GATHERED, precomputed
from varlen_graphs.spec import BufferSpec


def generic(tower: Any, budgets: Budgets | None = None, **options: Any) -> GraphedEncoder:
    """Graph a vision or audio tower of transformers 5.15 or newer that no recipe is for.

    Such a tower takes as keyword arguments what follows from its grid, `cu_seqlens` and the like. This finds by running
    it what it asks for and with which settings, declares buffers for that and what outputs have entries for, and puts
    our attention in the place of the tower's. The tower's own forward is what is captured, so its layers are not fused
    as a recipe fuses them.

    The encoder takes what the tower takes, its first argument and `grid_thw` (`image_grid_thw`, or `feature_lens`), and
    gives what it gives. A field whose size follows from neither rows nor items, such as the first row of a call, is
    `None`, which one warning says.

    Runs the tower three times now, on some hundred random rows, and compares what the buffers make of them.

    Args:
        tower: The tower, in the dtype and on the device it is to be run in.
        budgets: As for `GraphedEncoder`; `None` is `Ladder()`, for audio with room for `max(4, rows // 512)` clips.
        **options: Further arguments of `GraphedEncoder`.

    Raises:
        SpecError: The tower asks for something that no buffer is for, or comes out otherwise with buffers; which, is in
            the message. What a graph cannot hold in the tower's own lines is a `CaptureError` at the first call.
    """
    try:
        return _graph(tower, budgets, options)
    except SpecError as error:
        raise SpecError(
            f"{type(tower).__name__} cannot be graphed without a recipe: {error}; declare it yourself (docs/recipes.md)"
        ) from error


def _graph(module: Any, budgets: Budgets | None, options: dict[str, Any]) -> GraphedEncoder:
    tower = Tower(module)
    packed, calls = tower.inspect(_layouts(tower, merge=6)[0])
    if not calls:
        raise SpecError("its forward asks for no precomputed tensors; towers do from transformers 5.15 on")
    found = precomputed(module, calls)
    layouts = _layouts(tower, found.merge)
    expected = [tower.run(packed, layout) for layout in layouts]
    outputs, left = declare(expected, layouts, found.outputs)
    if left:
        warnings.warn(
            f"{left} of {type(module).__name__} will be None: not made of rows or items, so no graph can give them",
            stacklevel=4,
        )

    def forward(module: Any, **arguments: Any) -> Any:
        from varlen_graphs.integrations.transformers import use_attention

        for name in arguments.keys() & GATHERED:
            arguments[name] = _gather(arguments[tower.rows], *arguments[name])
        with use_attention(module):
            output = tower.forward(**arguments)
        return _without(output, left)

    layout = Lengths(tower.layout) if tower.is_audio else GridTHW(tower.layout, merge=found.merge)
    spec = BufferSpec(rows=packed, layout=layout, buffers=found.buffers, outputs=outputs)
    if budgets is None:
        budgets = [Budget(rows, items=max(4, rows // 512)) for rows in Ladder()] if tower.is_audio else Ladder()
    declared = GraphedEncoder(module, [1024], spec, forward=forward, backend="eager")
    for items, output in zip(layouts, expected, strict=True):
        got = declared.eager(tower.example(packed, items), tower.describe(items))
        _check(flatten(got, outputs).tensors, flatten(_without(output, left), outputs).tensors, items)
    return GraphedEncoder(module, budgets, spec, forward=forward, **options)


def _layouts(tower: Tower, merge: int) -> list[Layout]:
    """Layouts to run a tower on: one item, several, and several videos (or clips both shorter and longer than chunks)."""
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


def _check(came: list[Tensor], expected: list[Tensor], layout: Layout) -> None:
    """Whether a tower gives with buffers what it gives by itself, but for rounding.

    Raises:
        SpecError: It does not.
    """
    for a, b in zip(came, expected, strict=True):
        error = ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()
        if not error <= math.sqrt(torch.finfo(b.dtype).eps):
            raise SpecError(
                f"with buffers its output for items {layout.items} is another one (relative L2 {error:.1e}): more in it "
                "depends on the items than it asks for"
            )
