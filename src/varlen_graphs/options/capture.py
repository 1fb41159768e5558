"""Options of a capture."""

import os
from dataclasses import dataclass
from typing import Literal

from varlen_graphs.checks.fields import check_fields, is_integer
from varlen_graphs.errors import SpecError


@dataclass(frozen=True)
class Capture:
    """Options of captures: `GraphedEncoder(..., capture=vg.options.Capture(lazy=True))`.

    Attributes:
        lazy: Calls never capture. Budgets that calls request are captured between calls, by `capture_pending` or
            `capture_in_background`. Until then calls use other budgets where that is no slower than eager, or run
            eager, counted in `stats.eager` as `"not captured yet"`.
        compile: Compile with torch.compile before the first capture, once for all budgets: the blocks that the module
            repeats, or, where the forward does not run them all, the forward as a whole, which takes tens of seconds.
            The tape and eager calls run uncompiled.
        on_change: What to do when memory that graphs read has moved or changed its dtype. `"error"` raises
            `StaleGraphError`. `"recapture"` releases the graphs and captures them again in the same call, and logs a
            warning to the logger `varlen_graphs`, as calls do in any case where a number, text or forward of the module
            has changed.
        exact: Number of graphs of exactly the size of calls, for the sizes that came most often recently: such calls
            replay without padding, and give the bits of an eager run. They are captured between calls, by
            `capture_pending` or `capture_in_background`, where `memory=` leaves room.
        start_step: Ratio of rows, above 1, up to which `encoder.capture()` leaves a budget out because another one
            holds all of its calls. Each of these is captured later, by the first call of one item that fits it best,
            unless another call ended less than 50 ms before: that one, and calls of several items, use the budgets
            that have graphs, where these take at most so many times as long. `None` captures all.
        warmup: A file written by `save_warmup`, or the file to write at the end of this run. Measurements found there
            are not repeated, and with `lazy=True` the budgets used in the earlier run are captured first. It has a
            section for each encoder that was saved there.
        section: Name of the encoder's section in the warm-up file. By default the path of the tower in a wrapped model,
            else the class of the module. Encoders of equal modules and declarations are told apart by it.
        on_bad_warmup: What to do with a warm-up file that is damaged, no such file, or written for another device,
            version, module or declaration. `"ignore"` warns and measures again; `"error"` raises `InputError`.

    Raises:
        SpecError: `on_change` is neither `"error"` nor `"recapture"`, a flag is not a bool, `exact` is no number of
            graphs, or is given with `compile`, `start_step` is no ratio above 1, `warmup` is no path, or another option
            has a wrong value.
    """

    lazy: bool = False
    compile: bool = False
    on_change: Literal["error", "recapture"] = "error"
    exact: int = 0
    start_step: float | None = None
    warmup: str | os.PathLike[str] | None = None
    section: str | None = None
    on_bad_warmup: Literal["ignore", "error"] = "ignore"

    def __post_init__(self) -> None:
        if not isinstance(self.on_change, str) or self.on_change not in ("error", "recapture"):
            raise SpecError(f"on_change={self.on_change!r}: expected one of 'error', 'recapture'")
        for name in ("lazy", "compile"):
            if not isinstance(getattr(self, name), bool):
                raise SpecError(f"{name}={getattr(self, name)!r}: expected True or False")
        if not is_integer(self.exact) or self.exact < 0:
            raise SpecError(f"exact={self.exact!r}: expected a number of graphs, 0 or more")
        if self.exact and self.compile:
            raise SpecError(
                f"exact={self.exact} with compile=True: graphs of exact sizes have the bits of eager runs, which are "
                "not compiled; expected one of the two"
            )
        check_fields(self)
        if self.start_step is not None and not self.start_step > 1:
            raise SpecError(
                f"start_step={self.start_step!r}: expected a ratio of rows above 1, for example 1.2, or None"
            )
