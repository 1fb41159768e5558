"""A plan for a mixed trace: what it is expected to cost, beside what is then measured, and beside other ladders.

An encoder with the default ladder records the calls; it has measured its costs. From these plans are made, one with as
few graphs as powers of two need. Each set of budgets is captured and runs the same calls, one behind the other, so that
no launch is waited for, and then calls of the same kind that were not recorded. Nothing is timed unless it is about as
close to float32 as the tower's own run.

- expected: by the costs that the default ladder measured, interpolated, attention included.
- alone: the same by the costs that the budgets themselves have, measured after their capture.
- calls: milliseconds of the stream of calls, copies in and out included.
"""

import argparse
import copy
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import varlen_graphs as vg
from benchmarks import systems as ways
from benchmarks.common import check, collect, distance, facts, headline, table, write_json
from benchmarks.systems import Call
from benchmarks.traces import TRACES, Layout, trace
from varlen_graphs.traffic.comparison import compare
from varlen_graphs.traffic.planning import Plan, evaluate

WARM_UP = 8
"""Untimed calls ahead of a stream."""


def main() -> None:
    """Record, plan, capture, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=ways.TOWERS, default="8b")
    parser.add_argument("--graphs", type=int, default=32, help="budgets of the larger plan (32)")
    parser.add_argument("--calls", type=int, default=40, help="calls of each kind (40)")
    parser.add_argument("--rounds", type=int, default=5, help="how often a stream is timed (5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {**facts(), "tower": options.size, "seed": options.seed, "rows": []}
    print(f"{headline(result)}, {options.size} tower, bfloat16\n")
    tower = ways.make_tower(options.size, torch.bfloat16)
    calls, later = (mixed(options.calls, seed) for seed in (options.seed, options.seed + 1))
    recorder, build = ways.capture_ladder(tower, vg.Ladder())
    with recorder.record() as recorded:
        run(recorder, calls)
    plans = compare(recorded, vg.traffic.plan(recorded, max_graphs=options.graphs), recorder.costs)
    powers = plans["powers of two"]
    plans["plan, as few"] = vg.traffic.plan(recorded, max_graphs=len(powers.budgets))
    check_one = reference(tower, min(calls, key=lambda call: call.rows.shape[0]))

    def measure_one(name: str, encoder: vg.GraphedEncoder, build: dict[str, Any]) -> None:
        check_one(encoder)
        row = measure(plans[name], recorded, encoder, calls, later, options.rounds)
        result["rows"].append({"budgets": name, **row, "capture_gib": build["capture_gib"]})
        encoder.release()
        collect()
        write_json(options.json, result)

    measure_one("Ladder()", recorder, build)
    for name in ("plan", "plan, as few", "powers of two"):
        measure_one(name, *ways.capture_ladder(tower, plans[name]))
    print(report(result["rows"]))


def mixed(count: int, seed: int) -> list[Call]:
    """So many calls of every kind of trace, shuffled."""
    layouts = [layout for name in TRACES for layout in trace(name, count, seed)]
    random.Random(seed).shuffle(layouts)
    return calls_of(layouts)


def calls_of(layouts: Sequence[Layout]) -> list[Call]:
    """Calls of these layouts; their rows are parts of one block of random numbers."""
    largest = max(sum(t * h * w for t, h, w in layout) for layout in layouts)
    source = torch.randn(largest + 16 * len(layouts), ways.ROW, device="cuda", dtype=torch.bfloat16)
    return [ways.make_call(layout, source, 16 * at) for at, layout in enumerate(layouts)]


def run(encoder: vg.GraphedEncoder, calls: Sequence[Call]) -> None:
    """All calls, one after the other, with items that the host knows."""
    for call in calls:
        encoder(call.rows, grid_thw=list(call.layout))


def reference(tower: Any, call: Call) -> Callable[[vg.GraphedEncoder], None]:
    """What checks an encoder on a call, against a float32 copy of the tower and the tower's own distance to it."""
    with torch.no_grad():
        expected = ways.tensors(copy.deepcopy(tower).float()(call.rows.float(), grid_thw=call.grid))
    with ways.attention(tower, ways.FLASH2):
        eager_error = distance(ways.tensors(ways.run_eager(tower, call)), expected)

    def check_one(encoder: vg.GraphedEncoder) -> None:
        check(distance(ways.tensors(encoder(call.rows, grid_thw=list(call.layout))), expected), eager_error)

    return check_one


def measure(
    plan: Plan,
    recorded: vg.traffic.Trace,
    encoder: vg.GraphedEncoder,
    calls: Sequence[Call],
    later: Sequence[Call],
    rounds: int,
) -> dict[str, Any]:
    """One set of budgets: what was expected of it, and what it takes."""
    alone = evaluate(recorded, [budget.rows for budget in plan], encoder.costs)
    row = {
        "graphs": len(plan.budgets),
        "padding": plan.padding_share,
        "expected_ms": (plan.cost + plan.attention) / plan.calls,
        "alone_ms": (alone.cost + alone.attention) / alone.calls,
        "calls_ms": stream(encoder, calls, rounds),
        "expected_gib": (plan.memory or 0) / 2**30,
    }
    stats = encoder.stats
    made, rows, padding, eager = stats.calls, stats.rows, stats.padding, stats.eager.total()
    row["later_ms"] = stream(encoder, later, rounds)
    rows, padding = stats.rows - rows, stats.padding - padding
    share = (stats.eager.total() - eager) / (stats.calls - made)
    return row | {"later_padding": padding / max(1, rows + padding), "later_eager": share}


def stream(encoder: vg.GraphedEncoder, calls: Sequence[Call], rounds: int) -> float:
    """Milliseconds a call, of the device and of all calls queued behind one another; the median of some rounds."""
    run(encoder, calls[:WARM_UP])
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run(encoder, calls)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(calls))
    return statistics.median(times)


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The table: what was expected over what was measured is the point."""
    header = (
        "budgets", "graphs", "padding", "expected ms", "alone ms", "calls ms", "expected / alone", "expected / calls",
        "later ms", "later padding", "later eager", "expected GiB", "captured GiB",
    )  # fmt: skip
    lines = []
    for row in rows:
        expected, alone, calls = (row[f"{key}_ms"] for key in ("expected", "alone", "calls"))
        later = (row["later_ms"], f"{row['later_padding']:.1%}", f"{row['later_eager']:.1%}")
        lines.append(
            (
                row["budgets"], row["graphs"], f"{row['padding']:.1%}", expected, alone, calls, expected / alone,
                expected / calls, *later, row["expected_gib"], row["capture_gib"],
            )
        )  # fmt: skip
    return table(header, lines)


if __name__ == "__main__":
    main()
