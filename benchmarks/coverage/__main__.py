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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto import modeling_auto

JSON = Path("docs/benchmarks/coverage.json")
SECONDS = 240
MULTIMODAL = "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES"
ENCODERS = ["MODEL_FOR_IMAGE_MAPPING_NAMES", "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES"]
SPEECH = ["HubertModel", "Wav2Vec2Model", "WavLMModel", "ParakeetEncoder", "Wav2Vec2ConformerModel", "ASTModel"]


def classes(mapping: str) -> list[str]:
    """The classes of a mapping of transformers."""
    values = getattr(modeling_auto, mapping, {}).values()
    return sorted({name for value in values for name in (value if isinstance(value, tuple | list) else [value])})


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of a model, from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.coverage.run", name]
    command += [] if name in classes(MULTIMODAL) else ["encoder"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return [{"model": name, "modality": "", "found": None, "why": f"it took more than {SECONDS} seconds"}]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        rows.append({"model": name, "modality": "", "found": None, "why": done.stderr.strip().splitlines()[-1][:300]})
    return rows


def everything() -> list[str]:
    """All classes of the table."""
    return [*classes(MULTIMODAL), *(name for mapping in ENCODERS for name in classes(mapping)), *SPEECH]


def state(row: dict[str, Any]) -> str:
    """What became of a row, in one word."""
    if not row.get("found"):
        return "refused"
    if row["eager"]:
        return "eager"
    return "replayed" if row["replays"] and row["error"] < 1e-3 else "wrong"


def main() -> None:
    """Run all, and write the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", help="names of classes; all by default")
    parser.add_argument("--json", type=Path, default=JSON)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    rows = []
    with ThreadPoolExecutor(options.processes) as threads:
        for own in threads.map(rows_of, options.models or everything()):
            for row in own:
                rows.append(row)
                print(state(row), json.dumps(row)[:250], flush=True)
    counts: dict[str, int] = {}
    for row in rows:
        counts[state(row)] = counts.get(state(row), 0) + 1
    print(transformers.__version__, counts)
    if not options.models:
        options.json.write_text(json.dumps({"transformers": transformers.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
