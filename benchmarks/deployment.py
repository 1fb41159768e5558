"""Start and memory of a service of several models that share a pool or do not, and two replicas on one GPU.

Run with `python -m benchmarks.deployment`; with `--small` on the CPU, on the tape. Real sizes, random weights,
bfloat16: the tower of Qwen3-VL 8B and BERT-base, with budgets of 256 to 8,192 rows, and SigLIP so400m, with batches of
1 to 32.

- *service*: each row is a process of its own, with Triton's cache cold or warm, and one pool for all models or one for
  each. `<model>_s` are the seconds from a model on the GPU, without an encoder, to the answer to its first request.
  `start_s` are those from the beginning of the process to the last of these answers: imports, and making random weights
  (`weights_s`), included. `capture_s` are those of all further graphs. Then: the number of `graphs`; GiB of pools, of
  arenas and graphs `beside` them, and of the GPU that all of it took, its libraries included (`taken`).
- *replicas*: two processes with the tower of Qwen3-VL 2B, which answer one image of 448 x 448 after the other and wait
  for the GPU each time: requests a second of one alone, and of both at a time (together), without and with NVIDIA's
  Multi-Process Service. Where that cannot be started, the reason stands in its place.

Outputs are compared with eager ones, and those of the replicas with each other.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import BertConfig, BertModel, SiglipVisionConfig, SiglipVisionModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

import varlen_graphs as vg
from benchmarks.common import check, distance, facts, headline, table, write_json
from benchmarks.traces import SINGLES, image

BETWEEN = 2e-2
"""Relative L2 between two right outputs in bfloat16, which other kernels and tiles make different."""

GIB = 1 << 30

LONGEST_S = 120
"""Seconds after which a replica is killed, lest all wait for one that hangs."""

Request = tuple[Tensor, dict[str, Tensor]]
"""The first argument of a call, and the others."""


class NoMpsError(RuntimeError):
    """The Multi-Process Service cannot be used here."""


class Model(NamedTuple):
    """A model of transformers, its recipe, its sizes and budgets, both for `--small` too, and what makes a request."""

    kind: Any
    config: Any
    sizes: dict[str, Any]
    small: dict[str, Any]
    recipe: Callable[..., vg.GraphedEncoder]
    budgets: vg.Ladder | list[int]
    small_budgets: list[int]
    request: Callable[[Any, bool], Request]


def noise(*shape: int) -> Tensor:
    """Random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def patches(config: Any, small: bool) -> Request:
    """An image, as patches."""
    layout = (image(128),) if small else SINGLES["448x448"]
    numbers = config.in_channels * config.temporal_patch_size * config.patch_size**2
    return noise(sum(t * h * w for t, h, w in layout), numbers), {"grid_thw": torch.tensor(layout)}


def images(config: Any, small: bool) -> Request:
    """Two images of the model's own size."""
    return noise(2, config.num_channels, config.image_size, config.image_size), {}


def texts(config: Any, small: bool) -> Request:
    """Texts of several lengths, padded, and their mask."""
    lengths = torch.tensor([12, 40, 7, 25])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    ids = torch.randint(1, config.vocab_size, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    return ids, {"attention_mask": mask}


SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TOWERS = {
    "2b": {
        "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2048,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    "8b": {"out_hidden_size": 4096},
    "small": {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "deepstack_visual_indexes": [0],
    },
}  # fmt: skip
"""Towers of Qwen3-VL: what differs from the defaults of transformers."""

MODELS = {
    "qwen3_vl": Model(
        Qwen3VLVisionModel, Qwen3VLVisionConfig, TOWERS["8b"], TOWERS["small"],
        vg.recipes.qwen3_vl, vg.Ladder(256, 8192, step=1.25), [64, 256], patches,
    ),
    "siglip": Model(
        SiglipVisionModel, SiglipVisionConfig,
        {
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
            "image_size": 384, "patch_size": 14,
        },
        {**SMALL, "image_size": 32, "patch_size": 8},
        vg.recipes.by_batch, [1, 2, 4, 8, 16, 32], [1, 2], images,
    ),
    "bert": Model(
        BertModel, BertConfig, {}, {**SMALL, "vocab_size": 99},
        vg.recipes.packed_text, vg.Ladder(256, 8192, step=1.25, rows_per_item=8, rows_per_segment=8), [64, 128], texts,
    ),
}  # fmt: skip


def build(model: Model, small: bool, **changes: Any) -> tuple[Any, Request]:
    """A model with random weights on its device, and a request."""
    device, dtype = ("cpu", torch.float32) if small else ("cuda", torch.bfloat16)
    config = model.config(**(model.small if small else model.sizes) | changes)
    torch.manual_seed(0)
    with torch.device(device):
        built = model.kind._from_config(config, dtype=dtype).eval()
    first, others = model.request(config, small)
    first = first.to(device, dtype if first.is_floating_point() else None)
    return built, (first, {name: value.to(device) for name, value in others.items()})


def tensors(output: Any) -> list[Tensor]:
    """The tensors of an output that are compared."""
    return [output.last_hidden_state, output.pooler_output]


def synchronize(small: bool) -> None:
    """Wait for the GPU, if there is one."""
    if not small:
        torch.cuda.synchronize()


def free_bytes(small: bool) -> int:
    """Bytes of the GPU that nothing has, and torch does not keep."""
    if small:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


# A service of several models


@torch.no_grad()
def service(shared: bool, small: bool, begun: float) -> dict[str, Any]:
    """Start the models of a service in this process, which began at a time, and return what it took."""
    start = time.time()
    pool = vg.options.Pool() if shared else None
    built = {name: build(model, small) for name, model in MODELS.items()}
    synchronize(small)
    weights, free = time.time() - start, free_bytes(small)
    encoders: dict[str, vg.GraphedEncoder] = {}
    seconds: dict[str, float] = {}
    for name, model in MODELS.items():
        (module, (first, others)), start = built[name], time.perf_counter()
        budgets, backend = (model.small_budgets, "tape") if small else (model.budgets, "cuda")
        encoders[name] = model.recipe(module, budgets, backend=backend, pool=pool)
        encoders[name](first, **others)
        synchronize(small)
        seconds[f"{name}_s"] = time.perf_counter() - start
    started, start = time.time() - begun, time.perf_counter()
    for encoder in encoders.values():
        encoder.capture()
    captured = time.perf_counter() - start
    for name, encoder in encoders.items():
        first, others = built[name][1]
        check(distance(*(tensors(run(first, **others)) for run in (encoder, encoder.eager))), BETWEEN)
        assert not encoder.stats.eager, encoder.stats.eager  # noqa: S101
    taken = free - free_bytes(small)
    pools = {encoder.pool: encoder.pool.bytes() for encoder in encoders.values()}
    return {
        **seconds, "weights_s": weights, "start_s": started, "capture_s": captured,
        "graphs": sum(len(encoder.executor.store) for encoder in encoders.values()),
        "pools_gib": sum(pools.values()) / GIB,
        "beside_gib": sum(own.bytes() - own.pool.bytes() for own in encoders.values()) / GIB,
        "taken_gib": taken / GIB,
    }  # fmt: skip


# Replicas on one GPU


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """Run NVIDIA's Multi-Process Service; yields the environment of processes that share the GPU by it.

    Raises:
        NoMpsError: It cannot be started, or processes do not use it; with the reason.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        raise NoMpsError("there is no nvidia-cuda-mps-control")
    with tempfile.TemporaryDirectory(prefix="mps", ignore_cleanup_errors=True) as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}

        def run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
            with (Path(folder) / "output").open("w+") as output:  # a pipe would be held by the daemon
                try:
                    done = subprocess.run(
                        command, env=os.environ | own, stdout=output, stderr=output, text=True, timeout=60, check=False,
                        **options,
                    )  # fmt: skip
                except subprocess.TimeoutExpired as error:
                    raise NoMpsError(str(error)) from None
                output.seek(0)
                return subprocess.CompletedProcess(command, done.returncode, output.read().strip())

        if (started := run(control, "-d", stdin=subprocess.DEVNULL)).returncode:
            raise NoMpsError(f"the daemon did not start: {started.stdout}")
        try:
            client = run(sys.executable, "-c", "import torch; torch.zeros(1, device='cuda')")
            if client.returncode:
                raise NoMpsError(f"a process could not use it: {client.stdout.splitlines()[-1:]}")
            if not run(control, input="get_server_list\n").stdout:
                raise NoMpsError("processes do not use it")
            yield own
        finally:
            with suppress(NoMpsError):
                run(control, input="quit -t 10\n")


@torch.no_grad()
def replica(small: bool, seconds: float, path: Path) -> None:
    """Answer requests for some seconds after each line that comes, and print how many a second; write one output."""
    model = MODELS["qwen3_vl"]
    tower, (rows, others) = build(model, small, **({} if small else TOWERS["2b"]))
    encoder = model.recipe(tower, [64, 256] if small else [256, 1024], backend="tape" if small else "cuda").capture()
    ours, eager = (tensors(run(rows, **others)) for run in (encoder, encoder.eager))
    check(distance(ours, eager), BETWEEN)
    torch.save([tensor.cpu() for tensor in ours], path)
    print("ready", flush=True)
    for _ in sys.stdin:
        count, begin = 0, time.perf_counter()
        while (passed := time.perf_counter() - begin) < seconds:
            encoder(rows, **others)
            synchronize(small)
            count += 1
        print(count / passed, flush=True)


def replicas(small: bool, seconds: float, variables: Mapping[str, str]) -> dict[str, Any]:
    """Start two replicas in an environment, and measure one of them, then both."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        paths = [Path(folder) / f"{number}.pt" for number in range(2)]
        own = [stack.enter_context(_started(small, seconds, path, variables)) for path in paths]
        for process in own:
            if _line(process) != "ready":
                raise RuntimeError("a replica did not start")
        (alone,), together = _rates(own[:1]), _rates(own)
        outputs = [torch.load(path) for path in paths]
    apart = distance(*outputs)
    check(apart, BETWEEN)
    return {"alone_per_s": alone, "together_per_s": sum(together), "each_per_s": together, "distance": apart}


@contextmanager
def _started(
    small: bool, seconds: float, path: Path, variables: Mapping[str, str]
) -> Iterator["subprocess.Popen[str]"]:
    command = _own("--replica", str(path), "--seconds", str(seconds), *["--small"][:small])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, **variables}, text=True, **pipes) as process:
        end = threading.Timer(LONGEST_S, process.kill)
        end.start()
        try:
            yield process
        finally:
            end.cancel()
            process.kill()


def _own(*options: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.deployment", *options]


def _line(process: "subprocess.Popen[str]") -> str:
    return process.stdout.readline().strip() if process.stdout is not None else ""


def _rates(own: list["subprocess.Popen[str]"]) -> list[float]:
    for process in own:
        print("go", file=process.stdin, flush=True)
    lines = [_line(process) for process in own]
    if not all(lines):
        raise RuntimeError("a replica ended")
    return [float(line) for line in lines]


# The page


STARTS = (("cold", True), ("warm", True), ("warm", False))
"""Triton's cache, and whether a pool is shared, of each start."""


def start_services(rows: list[dict[str, Any]], small: bool) -> None:
    """Add a row for each start, a process of its own."""
    for name, shared in STARTS:
        pool = "shared" if shared else "own"
        command = _own("--service", pool, "--begun", str(time.time()), *["--small"][:small])
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise RuntimeError(run.stderr)
        rows.append({"cache": name, "pool": pool, **json.loads(run.stdout.splitlines()[-1])})


def run_replicas(rows: list[dict[str, Any]], small: bool, seconds: float) -> None:
    """Add the rows of replicas without and with MPS, or why there are none with it."""
    rows.append({"mps": "off", **replicas(small, seconds, {})})
    try:
        if small:
            raise NoMpsError("there is no GPU")
        with mps() as variables:
            rows.append({"mps": "on", **replicas(False, seconds, variables)})
    except RuntimeError as error:
        rows.append({"mps": f"not run: {error}"})


def main() -> None:
    """Run both parts, print tables, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small models on the CPU, replayed from the tape")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measurement of replicas")
    parser.add_argument("--parts", nargs="+", choices=["service", "replicas"], default=["service", "replicas"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--service", choices=["shared", "own"], help=argparse.SUPPRESS)
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--replica", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.service:
        print(json.dumps(service(options.service == "shared", options.small, options.begun)))
        return
    if options.replica:
        replica(options.small, options.seconds, options.replica)
        return
    result: dict[str, Any] = {} if options.small else facts()
    result |= {part: [] for part in options.parts}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        if "service" in options.parts:
            start_services(result["service"], options.small)
            write_json(options.json, result)
        if "replicas" in options.parts:
            run_replicas(result["replicas"], options.small, options.seconds)
    write_json(options.json, result)
    if not options.small:
        print(f"{headline(result)}\n")
    for part in options.parts:
        header = [name for name in result[part][0] if name != "each_per_s"]
        print(table(header, [[row.get(name) for name in header] for row in result[part]]), end="\n\n")


if __name__ == "__main__":
    main()
