"""How fine a ladder pays: time for padding against the seconds and the memory of its graphs.

Every ladder is captured twice, so that no kernel is compiled in the second capture, whose seconds count, and runs the
same calls of each trace, one behind the other, so that no launch is waited for. Nothing is timed unless it is about as
close to float32 as the tower's own run.

- ms: milliseconds of the device for a call, copies in and out included.
- padding: share of rows of replays.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

import varlen_graphs as vg
from benchmarks import page
from benchmarks import systems as ways
from benchmarks.common import collect, facts, headline, write_json
from benchmarks.plan import calls_of, reference, stream
from benchmarks.traces import TRACES, trace


def main() -> None:
    """Capture each ladder, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=ways.TOWERS, default="8b")
    parser.add_argument("--steps", type=float, nargs="+", default=[1.2, 1.1, 1.08, 1.05, vg.Ladder().step])
    parser.add_argument("--calls", type=int, default=32, help="calls of each trace (32)")
    parser.add_argument("--rounds", type=int, default=5, help="how often a stream is timed (5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {**facts(), "tower": options.size, "seed": options.seed, "rows": []}
    print(f"{headline(result)}, {options.size} tower, bfloat16\n")
    tower = ways.make_tower(options.size, torch.bfloat16)
    calls = {name: calls_of(trace(name, options.calls, options.seed)) for name in TRACES}
    check_one = reference(tower, min(calls["mix1"], key=lambda call: call.rows.shape[0]))
    for step in options.steps:
        encoder, build = ways.capture_ladder(tower, vg.Ladder(step=step))
        check_one(encoder)
        row = {"step": step, **{key: build[key] for key in ("budgets", "capture_s", "timing_s", "capture_gib")}}
        row["ms"] = {name: stream(encoder, some, options.rounds) for name, some in calls.items()}
        row["padding"] = {name: ways.padding_share(encoder, some)["padding"] for name, some in calls.items()}
        result["rows"].append(row)
        encoder.release()
        collect()
        write_json(options.json, result)
    print(page.ladder(result))


if __name__ == "__main__":
    main()
