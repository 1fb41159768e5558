"""Budgets of towers in engines, and when they are captured."""

from varlen_graphs.budgets.ladder import Budgets, DefaultBudgets, Ladder
from varlen_graphs.options.capture import Capture

DEFAULT = DefaultBudgets(Ladder(step=1.05))
"""Default budgets. Calls take some 1 % longer than with `Ladder()`, which has 1.8 times as many graphs."""

START_STEP = 1.15
"""An engine waits for a third of the default budgets before its first request; calls capture the others."""


def capture_options(budgets: Budgets | None) -> Capture:
    """Return options of captures in an engine: budgets that somebody asked for are all captured at the start."""
    return Capture(on_change="recapture", start_step=START_STEP if budgets is None else None)
