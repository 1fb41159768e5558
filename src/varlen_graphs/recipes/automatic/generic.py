"""Recipe for any tower of transformers that takes precomputed tensors: its own forward, declared by inspection."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.budgets.ladder import Budgets, DefaultBudgets, Ladder
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.other_outputs import OUTPUT_HIDDEN_STATES
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import SpecError, VarlenGraphsError, warn
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.grids import GridTHW
from varlen_graphs.layouts.items import Layout
from varlen_graphs.layouts.lengths import Lengths
from varlen_graphs.outputs.declared import HIDDEN_STATES, Declared, Fields
from varlen_graphs.recipes.automatic.precomputed import GATHERED, HELPERS, CountedExtent, not_replaced, precomputed
from varlen_graphs.recipes.inspection import PackedProbe, declare, raised_in
from varlen_graphs.recipes.modes.longest_segment import LongestSegment
from varlen_graphs.recipes.probe import RUN_ERRORS, tolerance_of
from varlen_graphs.recipes.towers import check_loaded
from varlen_graphs.shadows.shadow import Shadow


def generic(tower: Any, budgets: Budgets | None = None, **options: Any) -> GraphedEncoder:
    """Graph a vision or audio tower of transformers 5.15 or newer that has no recipe.

    Such a tower accepts the tensors that follow from its grid as keyword arguments: `cu_seqlens`, `position_ids` and so
    on. This function runs the tower on a few small layouts, records the tensors it requests and their settings,
    declares a buffer for each and the extents of the outputs, and replaces the tower's attention with
    `varlen_attention`. The graphs hold the tower's own forward, without the fused operations of other recipes.

    The encoder is called as the tower is, with its first argument and `grid_thw`, `image_grid_thw` or `feature_lens`,
    and returns the tower's own output type. A field whose size follows from neither rows nor items, such as the first
    row of a call, is `None`, and a warning names it.

    The runs are those of a copy that shares its weights, on some hundred random rows, and sync with the host. The
    outputs with declared buffers are compared with those of the tower alone.

    Args:
        tower: The tower, on its device and in its dtype.
        budgets: As for `GraphedEncoder`; `None` is `Ladder()`, for audio with room for `max(4, rows // 512)` clips.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: The tower requests a tensor that no buffer computes, cannot be captured, or returns another output
            with the declared buffers. The message names the argument or the line.
    """
    check_loaded(tower)
    try:
        probe = PackedProbe(Shadow(tower).module)
        probe.tolerance = tolerance_of(options)
        spec, forward = _declare(probe)
    except (VarlenGraphsError, *RUN_ERRORS) as error:
        name = type(tower).__name__
        raise SpecError(
            f"{name} needs a recipe: {error}\nTo write one, or to declare the arguments yourself, see docs/recipes.md"
        ) from error
    if budgets is None and isinstance(spec.layout, Lengths):
        budgets = DefaultBudgets([Budget(rows, items=max(4, rows // 512)) for rows in Ladder().row_counts()])
    return GraphedEncoder(tower, budgets, spec, forward=forward, **options)


def _declare(probe: PackedProbe) -> tuple[BufferSpec, Callable[..., Any]]:
    """Return the declaration of a tower found by running it, and its forward on `varlen_attention`."""
    module = probe.tower
    packed, calls = probe.inspect(_layouts(probe, merge=6)[1])
    replaced = [call for call in calls if call.helper in HELPERS]
    others = [call for call in calls if call.helper not in HELPERS]  # they count if a graph cannot hold what they do
    if not replaced:
        computing = [call for call in others if any(isinstance(part, Tensor) for part in tree_leaves(call.result))]
        if computing:
            raise not_replaced(computing[0])
        raise SpecError(
            "it requests no precomputed tensors: expected a tower of transformers 5.15 or newer, which does"
        )
    found = precomputed(module, replaced)
    layouts = _layouts(probe, found.merge)
    expected = [probe.run_items(packed, layout) for layout in layouts]
    outputs, unknown = declare(expected, layouts, found.outputs)
    rows = packed.name

    def forward(module: nn.Module, **arguments: Any) -> Any:
        from varlen_graphs.attention.transformers import sharing_schedules, use_attention

        for name in arguments.keys() & GATHERED:
            arguments[name] = _gather(arguments[rows], *arguments[name])
        longest = LongestSegment(arguments[rows].shape[packed.rows_dim])
        attention = use_attention(module, user=packed)  # `packed` lives as long as the encoder
        with attention, sharing_schedules(), longest:
            return _without(module.forward(**arguments), unknown)

    layout = Lengths(probe.layout) if probe.is_audio else GridTHW(probe.layout, merge=found.merge)
    states = _hidden_states(probe, packed, layouts, outputs, found.outputs)
    if states is not None and isinstance(outputs, Fields) and HIDDEN_STATES not in outputs.fields:
        outputs = Fields(**outputs.fields, **{HIDDEN_STATES: states})
    ignored = probe.ignored()
    spec = BufferSpec(
        rows=packed, layout=layout, buffers=found.buffers, outputs=outputs, ignored=ignored, declared_by="recipe"
    )
    trial = probe.trial(spec, forward, Budget(1024))
    for items, output in zip(layouts, expected, strict=True):
        try:
            trial.check(probe.call(packed, items), _without(output, unknown))
        except Exception as error:
            if (helper := raised_in(error, others)) is not None:
                raise SpecError(f"{not_replaced(helper)}: {error}") from error
            raise
    if unknown:
        warn(f"{type(module).__name__} returns {unknown}, which belong to no row or item: the encoder returns None")
    return spec, forward


def _hidden_states(
    probe: PackedProbe, packed: InputRows, layouts: list[Layout], outputs: Declared, known: Sequence[CountedExtent]
) -> Declared | None:
    """Return the declaration of the hidden states of a tower that returns them when it is asked, else `None`."""
    if not isinstance(outputs, Fields):
        return None
    try:
        runs = [probe.run_items(packed, layout, **{OUTPUT_HIDDEN_STATES: True}) for layout in layouts]
        declared, unknown = declare(runs, layouts, known)
    except (SpecError, *RUN_ERRORS):
        return None
    fields = declared.fields if isinstance(declared, Fields) else {}
    only_these = fields.keys() == {*outputs.fields, HIDDEN_STATES} and HIDDEN_STATES not in unknown
    return fields[HIDDEN_STATES] if only_these else None


def _layouts(probe: PackedProbe, merge: int) -> list[Layout]:
    """Return layouts to run a tower on: one image, several, two videos; or clips shorter and longer than a chunk."""
    m = merge
    grids = [[(1, 2 * m, 2 * m)], [(1, 2 * m, 4 * m), (1, 4 * m, 2 * m), (1, 2 * m, 2 * m)]]
    grids.append([(2, 2 * m, 2 * m), (2, 4 * m, 2 * m)])
    clips = [[(1, 1, 40)], [(1, 1, 7), (1, 1, 33)], [(1, 1, 7), (1, 1, 650), (1, 1, 33)]]
    return [Layout(tuple(items)) for items in (clips if probe.is_audio else grids)]


def _without(output: Any, unknown: list[str]) -> Any:
    """Return an output with some fields replaced by `None`."""
    return type(output)(**{name: part for name, part in output.items() if name not in unknown}) if unknown else output


def _gather(rows: Tensor, places: Tensor, real: Tensor) -> Tensor:
    """Gather rows `[dim, rows]` at `places` `[chunks, chunk]` to `[chunks, dim, chunk]`; 0 where `real` is false."""
    return rearrange(torch.where(real, rows[:, places], 0), "dim chunks rows -> chunks dim rows")
