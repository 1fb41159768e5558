"""Seconds of the first call of each input of a module from elsewhere, and milliseconds of the third, wrapped and fused.

Run with `python -m benchmarks.steps`. The modules and inputs of `benchmarks.modules`, inputs one after the other in one
process, a synchronize on both sides of every call. A first call captures, compiles and checks what it needs.

- *eager*: the second call of the module itself.
- *wrapped*: `vg.wrap(module)`.
- *fused*: `vg.wrap(module, capture=vg.options.Capture(compile=True))`.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import varlen_graphs as vg
from benchmarks.common import report
from benchmarks.modules import MODULES, made

SYSTEMS = ("wrapped", "fused")


def main() -> None:
    """Run the benchmark, print it, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", nargs="+", choices=MODULES, default=list(MODULES), metavar="MODULE")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS, metavar="SYSTEM")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    rows = (row for name in options.modules for system in options.systems for row in run(name, system))
    report(rows, ("module", "system", "input", "first_s", "eager_ms", "third_ms"), options.json)


@torch.no_grad()
def run(name: str, system: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each input."""
    torch.manual_seed(0)
    calls, module = MODULES[name].calls(), made(MODULES[name])
    eager = {given: [seconds(module, *call) for _ in range(2)][-1] for given, call in calls.items()}
    vg.wrap(module, capture=vg.options.Capture(compile=system == "fused"))
    for given, call in calls.items():
        first, _, third = (seconds(module, *call) for _ in range(3))
        took = {"first_s": first, "eager_ms": 1e3 * eager[given], "third_ms": 1e3 * third}
        yield {"module": name, "system": system, "input": given, **took}


def seconds(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return how long a call takes."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    module(*args, **kwargs)
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
