"""Facts of `docs/operate.md`: processes, compilers and faults, on real CUDA graphs."""

import ast
import shutil
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import varlen_graphs as vg
from benchmarks.deployment import NoMpsError, mps
from tests.support.gpu import on_gpus, pixels_on_gpu, tower_on_gpu
from tests.support.scripts import run_script, started_script
from tests.support.towers import equal_bits
from varlen_graphs.attention.hopper.config import runs_on

pytestmark = on_gpus()

GRID = [(1, 40, 40), (2, 8, 8)]
"""One segment that is long enough for the kernel that NVRTC compiles."""

REPLICA = f"""
    import os, sys, time
    import torch
    import varlen_graphs as vg
    from examples.servers.device import end_if_broken
    from tests.support import faults_on_gpu
    from tests.support.gpu import pixels_on_gpu, tower_on_gpu
    from tests.support.towers import distance, equal_bits

    torch.set_grad_enabled(False)
    grid = {GRID}
    rows = pixels_on_gpu(grid)

    def make(**options):
        return vg.recipes.qwen3_vl(tower_on_gpu(), [256, 2048], **options)

    def told(use):
        try:
            use()
            torch.cuda.synchronize()
        except RuntimeError as error:
            return f"{{type(error).__name__}}: {{error}}"
"""
"""Beginning of the scripts of replicas: a tower, and rows for it."""


# Forks


def test_an_encoder_that_was_not_used_yet_is_refused_in_a_forked_process_and_the_parent_goes_on():
    printed, _ = run_script(
        """
    encoder = make()
    child = os.fork()
    if child == 0:
        try:
            encoder(rows, grid_thw=grid)
        except vg.errors.StaleGraphError as error:
            print("told" if "forked after CUDA was used" in str(error) else error, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert distance(encoder(rows, grid_thw=grid), encoder.eager(rows, grid_thw=grid)) < 3e-2
    print("whole")
    """,
        prelude=REPLICA,
    )
    assert printed == ["told", "whole"]


def test_workers_of_a_data_loader_are_refused_and_the_parent_goes_on():
    printed, _ = run_script(
        """
    encoder = make()
    expected = encoder(rows, grid_thw=grid)
    loader = torch.utils.data.DataLoader(
        [0, 1], num_workers=2, multiprocessing_context="fork", collate_fn=lambda _: encoder(rows, grid_thw=grid)
    )
    try:
        next(iter(loader))
    except vg.errors.StaleGraphError:
        print("told")
    assert equal_bits(encoder(rows, grid_thw=grid), expected)
    print("whole")
    """,
        prelude=REPLICA,
    )
    assert printed == ["told", "whole"]


def test_workers_that_only_load_leave_the_encoder_of_the_parent_alone():
    printed, _ = run_script(
        """
    import gc
    from torch.utils.data import DataLoader, Dataset
    from tests.support.towers import pixels

    encoder = make()
    encoder(rows, grid_thw=grid)

    class Patches(Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, at):
            gc.collect()
            return pixels(grid, at)

    options = {"batch_size": None, "num_workers": 2, "multiprocessing_context": "fork", "pin_memory": True}
    for patches in DataLoader(Patches(), **options):
        patches = patches.to("cuda", torch.bfloat16, non_blocking=True)
        assert distance(encoder(patches, grid_thw=grid), encoder.eager(patches, grid_thw=grid)) < 3e-2
    print(encoder.stats.replays.total())
    """,
        prelude=REPLICA,
    )
    assert printed == ["17"]


BEFORE_CUDA = """
    import os
    import torch
    import varlen_graphs as vg
    from tests.support.encoders import Attention, attention_spec, rows_for

    module = Attention(16)  # on the CPU

    def in_child(work):
        child = os.fork()
        if child == 0:
            work()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
"""


def test_workers_forked_before_cuda_is_used_make_encoders_of_their_own():
    printed, _ = run_script(
        """
    def work():
        encoder = vg.GraphedEncoder(module.to("cuda"), [256, 512], attention_spec())
        rows = rows_for([200, 30], dim=16, device="cuda")
        torch.testing.assert_close(
            encoder(rows, lengths=[200, 30]), encoder.eager(rows, lengths=[200, 30]), rtol=1e-3, atol=1e-3
        )
        assert encoder.stats.replays.total() == 1
        print("right", flush=True)

    for _ in range(2):
        in_child(work)
    """,
        prelude=BEFORE_CUDA,
    )
    assert printed == ["right", "right"]


@pytest.mark.parametrize(("nvml", "expected"), [("0", "refused"), ("1", "works")])
def test_asking_for_cuda_before_a_fork_spoils_the_workers_unless_nvml_answers(nvml, expected, monkeypatch):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", nvml)
    printed, _ = run_script(
        """
    assert torch.cuda.is_available()

    def work():
        try:
            module.to("cuda")
        except RuntimeError as error:
            assert "Cannot re-initialize CUDA in forked subprocess" in str(error)
            print("refused", flush=True)
        else:
            print("works", flush=True)

    in_child(work)
    """,
        prelude=BEFORE_CUDA,
    )
    assert printed == [expected]


# Containers without a compiler

START = """
    encoder = make(capture=vg.options.Capture(warmup=os.environ["WARMUP"])).capture()
    out = encoder(rows, grid_thw=grid)
    assert encoder.stats.replays.total() == 1 and not encoder.stats.eager, encoder.stats
    assert distance(out, encoder.eager(rows, grid_thw=grid)) < 3e-2
    print("timed" if "timed" in encoder.executor.store.seconds else "known")
    print("NVRTC" if "cuda.bindings.nvrtc" in sys.modules else "no NVRTC")
    encoder.save_warmup(os.environ["WARMUP"])
"""


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """The folder of Triton's cache and the warm-up file of a start on a machine with a compiler."""
    folder = tmp_path_factory.mktemp("shipped")
    own = SimpleNamespace(cache=folder / "kernels", warmup=folder / "warmup.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(own.cache))
        patch.setenv("WARMUP", str(own.warmup))
        assert run_script(START, prelude=REPLICA)[0][0] == "timed"
    return own


@pytest.fixture
def container(tmp_path, monkeypatch):
    """A function that sets up the environment of a process that finds no compiler, but `file`, if it is installed."""

    def enter(cache, warmup):
        programs = tmp_path / "bin"
        programs.mkdir()
        if (file := shutil.which("file")) is not None:
            (programs / "file").symlink_to(file)
        monkeypatch.setenv("PATH", str(programs))
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
        monkeypatch.setenv("WARMUP", str(warmup))

    return enter


def files(folder):
    """Return all files of a folder, with the time of their last change."""
    return {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*") if path.is_file()}


def test_a_process_without_a_compiler_starts_from_the_cache_and_the_warm_up_file(shipped, container):
    container(shipped.cache, shipped.warmup)
    before = files(shipped.cache)
    assert any(path.name == "attention.cubin" for path in before) == runs_on(torch.device("cuda"), 72, 1600)
    assert run_script(START, prelude=REPLICA)[0] == ["known", "no", "NVRTC"]
    assert files(shipped.cache) == before


def test_a_cache_at_another_path_needs_no_compiler_but_kernels_compile_again(shipped, container, tmp_path):
    """Triton's cache names its files by their whole path."""
    moved = tmp_path / "moved"
    shipped.cache.rename(moved)
    try:
        before = files(moved)
        container(moved, shipped.warmup)
        assert run_script(START, prelude=REPLICA)[0] == ["known", "no", "NVRTC"]
        again = {path for path, changed in files(moved).items() if before.get(path) != changed}
        assert any(path.suffix == ".cubin" for path in again)
        assert not any(path.suffix == ".so" or path.name == "attention.cubin" for path in again)
    finally:
        moved.rename(shipped.cache)


def test_a_process_with_neither_compiler_nor_cache_is_told_what_it_lacks(container, tmp_path):
    container(tmp_path / "kernels", tmp_path / "warmup.json")
    printed, _ = run_script(
        """
    encoder = make()
    for use in (encoder.capture, lambda: encoder(rows, grid_thw=grid)):
        try:
            use()
        except vg.errors.CompilerError as error:
            print(error)
    """,
        prelude=REPLICA,
    )
    message = " ".join(printed)
    assert message.count("Failed to find C compiler") == 2
    assert f"a kernel is not in Triton's cache, {tmp_path / 'kernels'}, and" in message


# Faults

FAULTS = {"assertion": "device-side assert", "illegal_access": "illegal memory access"}


@pytest.fixture(scope="module")
def replica():
    """The replica of this process."""
    encoder, rows = vg.recipes.qwen3_vl(tower_on_gpu(), [256, 2048]).capture(), pixels_on_gpu(GRID)
    expected = encoder(rows, grid_thw=GRID)

    def answers():
        return equal_bits(encoder(rows, grid_thw=GRID), expected)

    yield answers
    encoder.release()


def test_a_replica_that_is_killed_amid_replays_harms_no_other(replica):
    with started_script(
        """
    encoder = make().capture()
    print("ready", flush=True)
    while True:
        encoder(rows, grid_thw=grid)
    """,
        prelude=REPLICA,
    ) as victim:
        assert victim.stdout.readline() == "ready\n"
        assert all(replica() for _ in range(50))
        victim.kill()
        assert all(replica() for _ in range(200))
    assert victim.returncode == -9


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_all_encoders_of_its_process_and_of_no_other(fault, replica):
    with started_script(
        f"""
    encoder, other, unused = make(), make(), make()
    lazy = make(capture=vg.options.Capture(lazy=True))
    for one in (encoder, other, lazy):
        one(rows, grid_thw=grid)
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(20):
        encoder(rows, grid_thw=grid)
    faults_on_gpu.{fault}()
    uses = [lambda one=one: one(rows, grid_thw=grid) for one in (encoder, other, unused, lazy)]
    for use in (*uses, encoder.check, other.capture, lazy.capture_pending, encoder.release):
        print(repr(told(use)), flush=True)
    end_if_broken()
    """,
        prelude=REPLICA,
    ) as victim:
        assert victim.stdout.readline() == "ready\n"
        victim.stdin.write("now\n")
        victim.stdin.flush()
        end = time.monotonic() + 40
        while victim.poll() is None:
            assert replica()
            assert time.monotonic() < end, "the end of the process hangs"
        assert all(replica() for _ in range(100))
        errors = [ast.literal_eval(line) for line in victim.stdout if line.startswith(("'", '"'))]
    assert victim.returncode == 1
    assert len(errors) == 8
    for error in errors:
        assert error.startswith(("AcceleratorError: ", "RuntimeError: ")), errors
        assert FAULTS[fault] in error, errors


# NVIDIA's Multi-Process Service


@pytest.fixture(scope="module")
def service():
    """The environment of processes that share the GPU by MPS."""
    try:
        with mps() as variables:
            yield variables
    except NoMpsError as error:
        pytest.skip(f"MPS could not be started here: {error}")


SURVIVOR = """
    encoder = make().capture()
    expected = encoder(rows, grid_thw=grid)
    assert distance(expected, encoder.eager(rows, grid_thw=grid)) < 3e-2
    print("ready", flush=True)
    sys.stdin.readline()
    end = time.monotonic() + 6

    def answers():
        while time.monotonic() < end:
            assert equal_bits(encoder(rows, grid_thw=grid), expected)

    print((told(answers) or "goes on").splitlines()[0], flush=True)
"""


@contextmanager
def two_replicas(service, script):
    """Start a survivor and another replica, which begin at the same time."""
    with (
        started_script(SURVIVOR, prelude=REPLICA, **service) as one,
        started_script(script, prelude=REPLICA, **service) as other,
    ):
        for replica in (one, other):
            assert replica.stdout.readline() == "ready\n"
        for replica in (one, other):
            replica.stdin.write("now\n")
            replica.stdin.flush()
        yield one, other


def test_replicas_that_share_a_gpu_by_mps_answer_as_ever(service):
    with two_replicas(service, SURVIVOR) as replicas:
        assert [replica.stdout.readline() for replica in replicas] == ["goes on\n", "goes on\n"]
        assert [replica.wait(30) for replica in replicas] == [0, 0]


def test_a_fault_under_mps_ends_the_other_replicas_too(service):
    """As NVIDIA documents: all clients of the GPU are told of it."""
    faulty = """
    encoder = make().capture()
    print("ready", flush=True)
    sys.stdin.readline()
    encoder(rows, grid_thw=grid)
    faults_on_gpu.illegal_access()
    told(lambda: None)
    """
    with two_replicas(service, faulty) as (survivor, _):
        assert "CUDA" in survivor.stdout.readline()
