"""`python -m varlen_graphs plan`: plan budgets for a trace and compare them with the usual ladders."""

import sys
from pathlib import Path

from varlen_graphs.errors import VarlenGraphsError
from varlen_graphs.traffic.comparison import bars, compare, table
from varlen_graphs.traffic.planning import ASSUMED, plan
from varlen_graphs.traffic.trace import Trace


def run_plan(path: Path, max_graphs: int, max_memory: str | None, costs_from: Path | None, figure: Path | None) -> int:
    """Print the plan for a trace, and plot it to `figure` if given; return the exit status."""
    try:
        trace = Trace.load(path)
        costs = (trace if costs_from is None else Trace.load(costs_from)).costs or ASSUMED
        chosen = plan(trace, max_graphs=max_graphs, max_memory=max_memory, costs=costs)
        plans = compare(trace, chosen, costs)
        print(f"{table(trace, plans)}\n\n{bars(chosen)}")
        if figure is not None:
            from varlen_graphs.traffic.figure import draw

            draw(plans, figure)
    except (VarlenGraphsError, OSError, ValueError) as error:  # matplotlib raises ValueError for an unknown format
        print(error, file=sys.stderr)
        return 1
    return 0
