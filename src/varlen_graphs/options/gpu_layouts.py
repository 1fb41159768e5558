"""Options for layouts that only the GPU sees."""

from dataclasses import dataclass
from typing import Literal, get_args

from varlen_graphs.checks.fields import is_integer
from varlen_graphs.checks.values import quoted
from varlen_graphs.errors import SpecError

LayoutCheck = Literal["reported", "checked"]


@dataclass(frozen=True)
class GpuLayouts:
    """Options for layouts on the GPU, which the host does not see.

        GraphedEncoder(..., layouts=vg.options.GpuLayouts(min_segment_rows=64))

    The GPU checks each of them. If one is wrong, the floating outputs of its call are NaN.

    Attributes:
        check: `"reported"`: no call waits; a wrong layout is logged, counted in `stats.wrong_layouts`, and raised by
            `check()`, but not by later calls. `"checked"`: each call waits for
            the GPU, and raises `LayoutError` itself.
        min_segment_rows: A promise: the frames or windows of a call, which the host cannot count, have this many rows
            on average, or more. Without it each may be one merge block, and few budgets have so many segments. A call
            that breaks the promise is wrong if its budget is too small.
        simulated: For tests with `backend="tape"`: items in tensors on the CPU count as items on the GPU, which the
            host does not see. Otherwise the host reads what lies on the CPU, and raises at once.

    Raises:
        SpecError: `check` is something else, `min_segment_rows` is below 1, or `simulated` is not a bool.
    """

    check: LayoutCheck = "reported"
    min_segment_rows: int = 1
    simulated: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.check, str) or self.check not in get_args(LayoutCheck):
            raise SpecError(f"layouts={quoted(self.check)}: expected 'reported', 'checked', or a GpuLayouts")
        if not is_integer(self.min_segment_rows) or self.min_segment_rows < 1:
            raise SpecError(f"min_segment_rows={quoted(self.min_segment_rows)}: expected an integer of at least 1")
        if not isinstance(self.simulated, bool):
            raise SpecError(f"simulated={quoted(self.simulated)}: expected True or False")
