"""Groups of processes: each runs the same scenarios one after the other, and writes down their errors."""

import datetime
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.towers import distance, equal_bits, tensors

ROOT = Path(__file__).parent.parent.parent
TIMEOUT = datetime.timedelta(seconds=30)
"""Time that ranks wait for each other."""


def run_group(module, ranks, folder, forks=False, **environment):
    """Run a module in so many processes at once, and return the errors of its scenarios by rank.

    A scenario that passes has an empty string. After one that fails no other is run. If it `forks`, one process imports
    the module for all of them, which those on GPUs must not share.
    """
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    common = os.environ | {"PYTHONPATH": paths, "WORLD_SIZE": str(ranks), "FOLDER": str(folder)} | environment
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=ROOT,
            env=common if forks else common | {"RANK": str(rank)},
            stdout=(folder / f"{rank}.log").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for rank in range(1 if forks else ranks)
    ]
    for process in processes:
        try:
            process.wait(timeout=300)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    results = [folder / f"{rank}.json" for rank in range(ranks)]
    return [json.loads(path.read_text()) if path.exists() else {} for path in results]


def groups_of(module, tmp_path_factory):
    """Return a function that gives the errors of a group by its number of ranks: each group runs once, for all tests."""
    started = {}

    def results_of(ranks):
        if ranks not in started:
            started[ranks] = run_group(module, ranks, tmp_path_factory.mktemp(f"ranks{ranks}"), forks=True)
        return started[ranks]

    return results_of


def check_scenario(results, scenario):
    """Check that a scenario passed on all ranks, except the last where that one is killed."""
    came = [own.get(scenario, "was not run, or did not end") for own in results]
    if "is_killed" in scenario:
        came.pop()
    assert came == [""] * len(came), "\n".join(came)


def fork(ranks, folder):
    """Become one of so many processes, and return its rank; the first process ends with the last of them.

    What most scenarios import later, they share.
    """
    for module in ("torch._dynamo", "transformers.models.qwen3_vl.modeling_qwen3_vl"):
        importlib.import_module(module)
    children = []
    for rank in range(ranks):
        if not (child := os.fork()):
            log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (sys.stdout, sys.stderr):
                os.dup2(log, stream.fileno())
            return rank
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    os._exit(0)


def run_scenarios(scenarios, backend):
    """Run functions of `(rank, ranks)` as one of the processes of `run_group`."""
    ranks, folder = int(os.environ["WORLD_SIZE"]), Path(os.environ["FOLDER"])
    rank = int(os.environ["RANK"]) if "RANK" in os.environ else fork(ranks, folder)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=ranks, timeout=TIMEOUT)
    results = {}
    for scenario in scenarios:
        start, name = time.perf_counter(), scenario.__name__
        try:
            scenario(rank, ranks)
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
        print(name, f"{time.perf_counter() - start:.1f} s", results[name], flush=True)
        (folder / f"{rank}.json").write_text(json.dumps(results))
        if results[name]:
            break  # ranks may no longer agree on what comes next
    os._exit(0)  # no rank waits for one that is lost


def check_on_all_ranks(got, expected, tolerance=1e-5):
    """Check that an output is as expected, and the same on every rank."""
    assert type(got) is type(expected)
    assert distance(got, expected) <= tolerance
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, {name: tensor.cpu() for name, tensor in tensors(got).items()})
    assert all(equal_bits(told[0], other) for other in told[1:])


def runs_of(items, ranks):
    """Return items in the order of the ranks that bring them, and those of each rank: the last one has none."""
    runs = [items[at :: ranks - 1] for at in range(ranks - 1)] + [[]]
    return [item for run in runs for item in run], runs
