"""Wrap every multimodal, speech, vision and text class of the installed transformers, and write the table.

Run with `python -m benchmarks.coverage`, or with names of classes. Each model is built tiny with random weights in a
process of its own, called at six layouts through its own functions for features (`get_audio_features`, or the model
itself where it has none) with items of unequal sizes, wrapped by `vg.wrap` on the tape, and called again with NaN in
all padding. A function that no call is known of has a row of its own. The JSON tells the version of transformers; to
run another one than is installed, put its folder in `PYTHONPATH`.
"""

import argparse
import json
import multiprocessing
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import transformers

from benchmarks.coverage.classes import ENCODERS, MULTIMODAL, classes
from benchmarks.coverage.outcomes import Row, outcome, state
from benchmarks.coverage.run import rows_of
from varlen_graphs.recipes.registry import RECIPES

PACKAGES = re.compile(rf"/\S*/site-packages/|{re.escape(str(Path(transformers.__file__).parents[1]))}/")
"""Folders of this machine that reasons name."""

SECONDS = 300
"""Time for a model."""

FORKED = multiprocessing.get_context("fork")
"""Processes start with everything imported, which takes longer than most models do."""


def send_rows(name: str, group: str, to: Connection) -> None:
    """Send the rows of a model, one by one."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            for row in rows_of(name, encoder=group == ENCODERS):
                to.send(row)
    except Exception as caught:
        to.send({"model": name, "modality": "", "found": None, "why": f"the benchmark failed: {caught!r}"[:300]})
    to.close()


def run(wanted: list[tuple[str, str]], processes: int) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of models as they end, so many processes at a time."""
    waiting, running = wanted[::-1], dict[Connection, tuple[str, Any, float, list[Row]]]()
    while waiting or running:
        while waiting and len(running) < processes:
            name, group = waiting.pop()
            ours, theirs = FORKED.Pipe(duplex=False)
            process = FORKED.Process(target=send_rows, args=(name, group, theirs))
            process.start()
            theirs.close()
            running[ours] = name, process, monotonic() + SECONDS, []
        ready = wait(running, timeout=1)
        for each, (name, process, end, rows) in [*running.items()]:
            late = monotonic() > end
            try:
                if each in ready:
                    rows.append(each.recv())
                if not late:
                    continue
            except EOFError:
                late = False
            process.kill()
            if late or not rows:
                why = f"it took more than {SECONDS} seconds" if late else "its process ended"
                rows.append({"model": name, "modality": "", "found": None, "why": why})
            del running[each]
            yield name, rows


def main() -> None:
    """Run all, and write the rows after each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="names of classes; all by default")
    parser.add_argument("--json", type=Path, help="file to write; rows of other models that it has stay")
    parser.add_argument("--without-recipes", action="store_true", help="as if no class had a recipe of its own")
    parser.add_argument("--processes", type=int, default=2, help="models at a time, each in one thread")
    options = parser.parse_args()
    if options.without_recipes:
        RECIPES.clear()  # the processes are forks of this one
    every = {name: group for group in (MULTIMODAL, ENCODERS) for name in classes(group)}
    found: dict[str, list[Row]] = {}
    if options.json is not None and options.json.exists() and options.models:
        for row in json.loads(options.json.read_text())["rows"]:
            found.setdefault(row["model"], []).append(row)
    for name, rows in run([(n, g) for n, g in every.items() if n in (options.models or every)], options.processes):
        found[name] = [{"group": every[name]} | row | {"why": PACKAGES.sub("", row["why"])} for row in rows]
        for row in rows:
            print(state(row), json.dumps(row)[:250], flush=True)
        if options.json is not None:
            ordered = [row for name in every for row in found.get(name, ())]
            recipes = not options.without_recipes
            result = {"transformers": transformers.__version__, "recipes": recipes, "rows": ordered}
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    outcomes = {
        group: Counter(outcome(found[n]) for n in found if every[n] == group) for group in (MULTIMODAL, ENCODERS)
    }
    print(transformers.__version__, {group: dict(counts) for group, counts in outcomes.items()})


if __name__ == "__main__":
    main()
