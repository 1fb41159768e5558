"""Wrap every multimodal, speech, vision and text class of the installed transformers, and write the table.

Run with `python -m benchmarks.coverage`, or with names of classes. Each model is built tiny with random weights in a
process of its own, called at six layouts through its own functions for features, wrapped by `vg.wrap` on the tape, and
called again with NaN in all padding.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import transformers

from benchmarks.coverage.classes import ENCODERS, MULTIMODAL, classes
from benchmarks.coverage.outcomes import outcome, state

SECONDS = 300


def rows_of(name: str, group: str) -> list[dict[str, Any]]:
    """The rows of a model, from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.coverage.run", name, *(["encoder"] if group == ENCODERS else [])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    row = {"model": name, "modality": "", "found": None}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return [row | {"why": f"it took more than {SECONDS} seconds"}]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        rows.append(row | {"why": f"the benchmark failed: {done.stderr.strip().splitlines()[-1][:300]}"})
    return rows


def main() -> None:
    """Run all, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="names of classes; all by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    every = [(name, group) for group in (MULTIMODAL, ENCODERS) for name in classes(group)]
    wanted = [(name, group) for name, group in every if not options.models or name in options.models]
    result: dict[str, Any] = {"transformers": transformers.__version__, "rows": []}
    outcomes = {group: Counter[str]() for group in (MULTIMODAL, ENCODERS)}
    with ThreadPoolExecutor(options.processes) as threads:
        for (_, group), own in zip(wanted, threads.map(lambda each: rows_of(*each), wanted), strict=True):
            outcomes[group][outcome(own)] += 1
            for row in own:
                result["rows"].append({"group": group} | row)
                print(state(row), json.dumps(row)[:250], flush=True)
    print(transformers.__version__, {group: dict(counts) for group, counts in outcomes.items()})
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
