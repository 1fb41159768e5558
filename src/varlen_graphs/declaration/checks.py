"""Check a declaration for mistakes that show before any call."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.buffers import AttentionMask, Buffer, HostBuffer, PrefixIndex, RelativePositionBias
from varlen_graphs.checks.fields import check_at_least
from varlen_graphs.declaration.image_processor import check_processor
from varlen_graphs.errors import BudgetError, SpecError, counted
from varlen_graphs.inputs.extra import Input, PerItem, PerRow
from varlen_graphs.inputs.patches import Patches
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.arguments import LayoutArgument
from varlen_graphs.layouts.grids import GridTHW
from varlen_graphs.layouts.pictures import Pictures
from varlen_graphs.layouts.segments import Windows
from varlen_graphs.outputs.declared import extents
from varlen_graphs.outputs.entries import Entries, Extent, Groups, Rows

if TYPE_CHECKING:
    from varlen_graphs.declaration.buffer_spec import BufferSpec


def check_types(spec: "BufferSpec") -> None:
    """Check that rows, layout, buffers and inputs are declarations."""
    if not isinstance(spec.rows, str | InputRows):
        raise SpecError(f"rows={spec.rows!r}: expected the name of one argument, or an inputs.Rows")
    if not isinstance(spec.layout, LayoutArgument):
        raise SpecError(
            f"layout={spec.layout!r}: expected a declaration of the argument that describes the items, such as "
            "Lengths('lengths') or GridTHW('grid_thw')"
        )
    if not isinstance(spec.buffers, Sequence) or not all(isinstance(b, Buffer | HostBuffer) for b in spec.buffers):
        raise SpecError(f"buffers={spec.buffers!r}: expected a list of declarations, such as [vg.buffers.CuSeqlens()]")
    if not isinstance(spec.inputs, Sequence) or not all(isinstance(one, Input) for one in spec.inputs):
        raise SpecError(
            f"inputs={spec.inputs!r}: expected a list of PerRow, PerItem and PerCall of vg.inputs, such as "
            "[vg.inputs.PerItem('timestep')]"
        )
    if isinstance(spec.ignored, str) or not isinstance(spec.ignored, Sequence):
        raise SpecError(f"ignored={spec.ignored!r}: expected a list of names of arguments, such as ['attention_mask']")
    check_at_least(spec, 1, "min_rows")
    if spec.declared_by not in ("user", "recipe"):
        raise SpecError(f"declared_by={spec.declared_by!r}: expected 'user' or 'recipe'")


def check_names(spec: "BufferSpec") -> None:
    """Check that each argument is declared once, by a string, and that at most one column describes groups."""
    names = [spec.row_input.name, *spec.describing]
    names += [column.name for column in spec.layout.columns if column.function is not None]
    names += [*(one.name for one in (*spec.buffers, *spec.inputs)), *spec.ignored]
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise SpecError(f"{wrong} declared as arguments: expected their names, as strings")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SpecError(f"{twice} declared more than once: expected one declaration for each argument, got {names}")
    nested = [column.name for column in spec.layout.columns if column.groups]
    if len(nested) > 1:
        raise SpecError(f"columns {nested} would all describe the groups: expected one NestedColumn")


def check_rows(spec: "BufferSpec") -> None:
    """Check that buffers and outputs suit the rows: packed ones, or those of a padded batch."""
    if spec.min_rows > 1 and spec.batched:
        raise SpecError(
            f"min_rows={spec.min_rows} with {type(spec.layout).__name__}: expected packed rows, whose items a module "
            "sees without padding; leave it out for a padded batch"
        )
    if spec.layout.padded and spec.row_input.padded_by:
        raise SpecError(
            f"{spec.rows!r} is to be packed, but {type(spec.layout).__name__} has padded rows: leave padded_by out, or "
            "declare Mask(packed=True) instead, or another layout of packed rows"
        )
    if spec.layout.packed and spec.row_input.padded_by:
        raise SpecError(
            f"{spec.rows!r}, but {type(spec.layout).__name__}({spec.layout.name!r}) is the mask of the batch: leave "
            "padded_by out, or declare a layout of packed rows, such as Lengths"
        )
    if spec.layout.one_row and spec.row_input.padded_by:
        raise SpecError(
            f"{spec.rows!r} is a batch of items of one size: leave padded_by out, or declare another layout"
        )
    if spec.layout.one_row and spec.row_multiple > 1:
        raise SpecError(
            f"{spec.outputs!r}: in a Batch each item is one row; declare Rows() or Items() for an entry an item, "
            "Items(rows=...) for several"
        )
    if isinstance(spec.row_input.normalize, Patches) and not isinstance(spec.layout, GridTHW):
        raise SpecError(
            f"{spec.rows!r} are images, but {type(spec.layout).__name__} describes none: expected GridTHW, whose h and "
            "w are heights and widths in patches"
        )
    if isinstance(spec.layout, Pictures):
        _check_pictures(spec, spec.layout)
    check_processor(spec)
    kind = "padded" if spec.layout.padded else "packed"
    for buffer in spec.buffers:
        if isinstance(buffer, PrefixIndex) and not spec.layout.prefix:
            raise SpecError(f"{buffer!r}, but {spec.layout!r} has no prefix rows: declare how many by prefix=")
        if isinstance(buffer, RelativePositionBias) and spec.layout.prefix:
            raise SpecError(f"{buffer!r}: prefix rows have no positions; leave prefix out, or declare a DeviceBuffer")
        if isinstance(buffer, AttentionMask) and buffer.of_item and not spec.layout.padded:
            raise SpecError(f"{buffer!r} is for packed rows: leave of_item out, or declare a padded batch")
        if isinstance(buffer, AttentionMask) and buffer.per != "item" and spec.layout.padded:
            raise SpecError(f"{buffer!r}: rows of a padded batch attend to those of their item; leave per out")
        if buffer.for_rows not in (kind, None):
            raise SpecError(
                f"{buffer!r} is for {buffer.for_rows} rows, but {type(spec.layout).__name__} has {kind} ones; declare "
                "AttentionMask, RelativePositionBias, Mask, MaxSeqlen, DeviceBuffer or HostBuffer of vg.buffers for a "
                "padded batch, the others for packed rows"
            )
    if spec.batched and spec.row_input.rows_dim:
        raise SpecError(f"{spec.rows!r}: a padded batch is [batch, length, ...]; leave rows_dim out")
    for one in spec.inputs:
        if spec.batched and isinstance(one, PerRow) and one.rows_dim:
            raise SpecError(f"{one!r}: in a padded batch it is [batch, length, ...]; leave rows_dim out")
        if spec.layout.padded and isinstance(one, PerItem) and one.per_row:
            raise SpecError(
                f"{one!r}: a padded batch has an entry an item in its first dimension; leave per_row out, and expand "
                "it in the module"
            )
    for extent in extents(spec.outputs):
        _check_extent(spec, extent)


def _check_pictures(spec: "BufferSpec", layout: Pictures) -> None:
    shape, side = spec.row_input.shape, layout.patch
    if shape is None or len(shape) != 3 or shape[1:] != (side, side):
        raise SpecError(
            f"{spec.rows!r}: expected vg.inputs.Rows({spec.row_input.name!r}, (channels, {side}, {side})), because "
            f"rows of {layout!r} are patches of pictures"
        )
    if any(isinstance(one, PerRow) for one in spec.inputs):
        raise SpecError(f"{spec.inputs!r}: rows of {layout!r} are patches of pictures, so expected no PerRow beside")
    if spec.row_multiple > 1:
        raise SpecError(f"{spec.outputs!r}: of pictures, expected an entry for each patch, or Entries(...)")


def _check_extent(spec: "BufferSpec", extent: Extent) -> None:
    if isinstance(extent, Rows):
        if spec.batched and extent.rows_dim:
            raise SpecError(f"{extent!r}: a padded batch is [batch, length, ...]; leave rows_dim out")
        if extent.prefix and not spec.layout.prefix:
            raise SpecError(
                f"{extent!r}, but {spec.layout!r} has no prefix rows: declare how many each item has by prefix=, or "
                "leave it out here"
            )
    if isinstance(extent, Entries) and extent.at_budget is None:
        if not spec.layout.padded:
            raise SpecError(
                f"{extent!r}: expected at_budget for packed rows, a function that gives the number of entries which "
                "the module returns at a budget"
            )
        if extent.rows_dim:
            raise SpecError(f"{extent!r}: a padded batch is [batch, length, ...]; leave rows_dim out")


def check_segments(spec: "BufferSpec") -> None:
    """Check that the layout has the segments and groups that buffers and outputs use, and windows have one size."""
    for buffer in spec.segmented:
        if buffer.per not in ("frame", "item", "clip", "group") and not isinstance(buffer.per, Windows):
            raise SpecError(f"{buffer!r}: expected per='frame', 'item', 'clip', 'group' or Windows(side)")
        if spec.layout.prefix and buffer.per not in ("item", "clip"):
            raise SpecError(
                f"{buffer!r}: expected per='item', because the layout declares prefix rows, which each item has once"
            )
        if buffer.per == "group":
            _check_grouped(spec, buffer, "per='item'")
        elif buffer.per != "item" and not spec.layout.has_frames:
            cut = "declare GridTHW, with t = 1 for an image" if isinstance(buffer.per, Windows) else "use per='item'"
            raise SpecError(
                f"{buffer!r} needs items with frames, which {type(spec.layout).__name__} does not describe; {cut}"
            )
    orders = [getattr(buffer, name, None) for buffer in spec.buffers for name in ("windows", "order")]
    sizes = {per for per in (*spec.usage.kinds, *orders) if isinstance(per, Windows)}
    if len(sizes) > 1:
        raise SpecError(f"got {sorted(sizes, key=lambda per: per.side)}: expected windows of one size")
    for extent in extents(spec.outputs):
        if isinstance(extent, Groups):
            _check_grouped(spec, extent, "Items(...)")


def check_budgets(spec: "BufferSpec", budgets: Sequence[Budget]) -> None:
    """Check that some item could use each budget, and that budgets of padded batches describe one."""
    if spec.layout.padded:
        for budget in budgets:
            if budget.rows != budget.items * budget.max_seqlen:
                raise BudgetError(
                    f"{budget} does not describe a padded batch: expected rows = items * max_seqlen; write "
                    "vg.budgets.Budget.padded(batch, length), or a vg.budgets.PaddedLadder"
                )
            if budget.max_seqlen < spec.shortest:
                raise BudgetError(
                    f"no item could use {budget}: an item of fewer than {spec.shortest} rows has no entry in some "
                    f"output; raise its length, or write vg.budgets.PaddedLadder(min_length={spec.shortest}) or more"
                )
    for budget in budgets:
        if min(budget.rows, budget.max_seqlen if spec.layout.padded else budget.rows) < spec.smallest:
            raise BudgetError(
                f"no item could use {budget}: the smallest item has {counted(spec.smallest, 'row')}, as "
                f"BufferSpec(min_rows={spec.min_rows}) declares; raise the budget"
            )
    _, whole, _ = spec.usage.by_kind
    shortest = spec.row_multiple if whole else spec.layout.row_multiple
    for budget in budgets:
        if spec.usage.kinds and budget.max_seqlen < shortest:
            raise BudgetError(
                f"no item could use {budget}: the shortest segment has {counted(shortest, 'row')} (merge size "
                f"{spec.layout.merge}, and the ratios of the outputs); raise max_seqlen"
            )


def _check_grouped(spec: "BufferSpec", declaration: object, instead: str) -> None:
    if not spec.layout.grouped:
        raise SpecError(
            f"{declaration!r} needs groups of items, which {spec.layout.name!r} does not describe: declare a "
            f"NestedColumn, or use {instead}"
        )
