"""When graphs of towers in engines are captured."""

from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.options.capture import Capture

START_STEP = 1.15
"""An engine waits for a third of the default budgets before its first request; calls capture the others."""


def capture_options(budgets: Budgets | None) -> Capture:
    """Return options of captures in an engine: budgets that somebody asked for are all captured at the start."""
    return Capture(on_change="recapture", start_step=START_STEP if budgets is None else None)
