"""Axes along which rows have coordinates in their item."""

from collections.abc import Sequence
from typing import Literal, get_args

from varlen_graphs.errors import SpecError

Axis = Literal["t", "h", "w", "row"]
"""Coordinate of a row: its frame, its height or width in the frame, or its index in the item."""


def axis_names(axes: tuple[Axis, ...]) -> str:
    """Check the axes, and return them in the form that the kernels take."""
    if not isinstance(axes, tuple | list) or not axes or not all(axis in get_args(Axis) for axis in axes):
        raise SpecError(f"axes={axes!r}: expected one or more of 't', 'h', 'w', 'row'")
    return " ".join(axes)


def axis_size(item: Sequence[int], axis: Axis) -> int:
    """Return the size of an item along an axis."""
    t, h, w = item[:3]
    return {"t": t, "h": h, "w": w, "row": t * h * w}[axis]
