"""Options of the verification in service."""

import math
from dataclasses import dataclass

from varlen_graphs.checks.fields import check_fields, is_integer
from varlen_graphs.errors import SpecError


@dataclass(frozen=True)
class Verify:
    """Options of the check of new graphs, and of the verification in service.

        GraphedEncoder(..., verify=vg.options.Verify(3, strict=True))

    The *check* is part of every capture, for each set of static arguments: a few small items are replayed in each new
    graph, and items of several sizes in the largest, with NaN in the pool and in all padding, and with other values.
    They are made of the rows of the call that needs the graphs.
    The outputs must equal those of the module itself, run eager without padding. A graph that fails is not used, with a
    warning, and calls that need it run eager; `report()` and `stats` show why.

    *In service*, the first calls of each budget, for each set of static arguments, are compared with the module itself.
    A budget with a wrong output is disabled: its calls use other budgets or run eager. The call that found it gets the
    eager output; `report()`, `stats` and the logger `varlen_graphs` show why. A verified call costs one eager
    call, syncs, and copies items that are on the GPU to the host.

    Attributes:
        calls: Number of calls to verify in service for each budget. The first is compared in any case, but without
            `at_capture`.
        strict: Raise `VerificationError` at a wrong output, in the check as well, besides not using the graph.
        tolerance: Largest error allowed, relative L2 of each item, here and in `GraphedEncoder.verify`. By default
            1e-5, 5e-3 for float16 and TF32, 3e-2 for bfloat16.
        at_capture: `False` leaves out the check and that comparison: a graph is used as it was captured.

    Raises:
        SpecError: A negative number of calls, or a tolerance that is no relative error.
    """

    calls: int = 0
    strict: bool = False
    tolerance: float | None = None
    at_capture: bool = True

    def __post_init__(self) -> None:
        if not is_integer(self.calls) or self.calls < 0:
            raise SpecError(
                f"verify={self.calls!r}: expected the number of calls to verify for each budget, 0 for none"
            )
        check_tolerance(self.tolerance)
        check_fields(self)


def check_tolerance(tolerance: float | None) -> None:
    """Check that a tolerance is a relative error."""
    if tolerance is not None and not (isinstance(tolerance, int | float) and 0 <= tolerance < math.inf):
        raise SpecError(f"tolerance={tolerance!r}: expected a relative error of at least 0, or None")
