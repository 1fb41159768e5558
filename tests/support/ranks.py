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


def run_group(module, ranks, folder, **environment):
    """Run a module in so many processes at once, one for each GPU, and return the errors of its scenarios by rank.

    A scenario that passes has an empty string. After one that fails no other is run.
    """
    _run(module, folder, [{"WORLD_SIZE": str(ranks), "RANK": str(rank)} | environment for rank in range(ranks)])
    return _results(folder, ranks)


def run_groups(module, groups, folder):
    """Run a module that calls `fork_groups` with these groups, and return the errors of each by rank."""
    _run(module, folder, [{}])
    return {name: _results(folder / name, ranks) for name, (ranks, _) in groups.items()}


def _run(module, folder, environments):
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    common = os.environ | {"PYTHONPATH": paths, "FOLDER": str(folder)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=ROOT,
            env=common | environment,
            stdout=(folder / f"{index}.log").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for index, environment in enumerate(environments)
    ]
    for process in processes:
        try:
            process.wait(timeout=400)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _results(folder, ranks):
    results = [folder / f"{rank}.json" for rank in range(ranks)]
    return [json.loads(path.read_text()) if path.exists() else {} for path in results]


def check_scenario(results, scenario):
    """Check that a scenario passed on all ranks, except the last where that one is killed."""
    came = [own.get(scenario, "was not run, or did not end") for own in results]
    if "is_killed" in scenario:
        came.pop()
    assert came == [""] * len(came), "\n".join(came)


def fork_groups(groups):
    """Run groups of so many ranks and their scenarios over gloo one after the other, in forks of this process.

    What most scenarios import later, they share.
    """
    for module in ("torch._dynamo", "transformers.models.qwen3_vl.modeling_qwen3_vl"):
        importlib.import_module(module)
    for name, (ranks, scenarios) in groups.items():
        folder = Path(os.environ["FOLDER"], name)
        folder.mkdir()
        children = []
        for rank in range(ranks):
            if not (child := os.fork()):
                log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
                for stream in (sys.stdout, sys.stderr):
                    os.dup2(log, stream.fileno())
                run_as_rank(rank, ranks, folder, scenarios, "gloo")
            children.append(child)
        for child in children:
            os.waitpid(child, 0)


def run_scenarios(scenarios, backend):
    """Run functions of `(rank, ranks)` as one of the processes of `run_group`."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    run_as_rank(rank, ranks, Path(os.environ["FOLDER"]), scenarios, backend)


def run_as_rank(rank, ranks, folder, scenarios, backend):
    """Run scenarios as one rank of a group, and end the process."""
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
