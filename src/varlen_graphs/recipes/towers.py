"""Checks of towers and declarations of buffers that recipes share."""

import inspect
import sys
from collections.abc import Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from varlen_graphs.buffers import AttentionSchedule, Buffer, CuSeqlens, DeviceBuffer, MaxSeqlen
from varlen_graphs.errors import SpecError
from varlen_graphs.layouts.dtypes import why_not_loaded
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.segments import Per


def check_parts(tower: object, parts: Sequence[str], expected: str) -> None:
    """Check that a tower has the submodules and attributes that a recipe uses by name."""
    missing = [name for name in parts if not hasattr(tower, name)]
    if missing:
        raise SpecError(f"{type(tower).__name__} has no {missing}: expected {expected}")


def check_loaded(tower: object) -> None:
    """Check that a tower has its weights, which recipes that run it need.

    Raises:
        SpecError: Some are on the meta device, or made by the first run.
    """
    if not isinstance(tower, nn.Module):
        return
    if (reason := why_not_loaded(tower)) is not None:
        raise SpecError(reason)
    if (name := next((name for name, one in tower.named_parameters() if nn.parameter.is_lazy(one)), None)) is not None:
        raise SpecError(f"{type(tower).__name__} makes {name!r} in its first run: expected all weights; run it once")


def device_of(tower: nn.Module) -> torch.device:
    """Return the device of a tower's first parameter, or the CPU."""
    return next((one.device for one in tower.parameters()), torch.device("cpu"))


def output_class(tower: Any, *names: str) -> Any:
    """Return the first of these classes that the tower's forward names, or else that its own file has, or `None`.

    Versions of transformers differ.
    """
    # A subclass of the tower's class may live in another file, so the files of the base classes are searched too.
    modules = [sys.modules[cls.__module__] for cls in type(tower).__mro__]
    named = [name for code in _forwards(tower) for name in names if name in code.co_names]
    return next((getattr(one, name) for name in (*named, *names) for one in modules if hasattr(one, name)), None)


def sets_field(tower: Any, name: str) -> bool:
    """Return True if the tower's forward names a field of its output."""
    constants = (one for code in _forwards(tower) for one in code.co_consts)  # those of keywords are tuples
    return any(isinstance(one, tuple) and name in one for one in constants)


def _forwards(tower: Any) -> list[CodeType]:
    """Return the code of the forward of the tower's class, and of those of its bases, which it may call."""
    owners = (cls for cls in type(tower).__mro__ if "forward" in vars(cls))
    found = (getattr(inspect.unwrap(vars(cls)["forward"]), "__code__", None) for cls in owners)
    return [code for code in found if code is not None]


def attention_buffers(attn: Any, per: Per) -> list[Buffer]:
    """Return the buffers `cu_seqlens`, `max_seqlen` and `schedule` of attention within segments."""
    return [CuSeqlens(per=per), MaxSeqlen(per=per), AttentionSchedule(attn.num_heads, attn.head_dim, per=per)]


def item_table() -> DeviceBuffer:
    """Return a buffer that passes the item table itself to the forward, as `table`."""
    return DeviceBuffer("table", _whole_table, any_segments=False)


def _whole_table(table: ItemTable) -> ItemTable:
    return table


def block_places(table: ItemTable) -> Tensor:
    """Return the places of rows in raster order, block by block, int64 `[rows]`."""
    t, h, w = table.positions("merge_block")
    height, width = table.row_size
    places: Tensor = table.item_starts[table.row_item] + (t * height + h) * width + w
    return places.clamp(0, table.budget.rows - 1)
