"""`kernels.launch`, where Triton cannot build what launches a kernel."""

from subprocess import CalledProcessError

import pytest

import varlen_graphs as vg
from varlen_graphs.kernels.launch import launch

pytest.importorskip("triton")


def kernel_that_raises(error):
    class Kernel:
        def __getitem__(self, grid):
            def run(*args):
                raise error

            return run

    return Kernel()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
        CalledProcessError(1, ["gcc", "main.c"]),
        FileNotFoundError(2, "No such file or directory: '/sbin/ldconfig'"),
    ],
    ids=["no compiler", "a compiler that fails", "no ldconfig"],
)
def test_what_a_machine_lacks_is_told_with_what_helps(error, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pytest.raises(vg.errors.CompilerError) as told:
        launch(kernel_that_raises(error), (1,))
    message = str(told.value)
    for part in (f"not in Triton's cache, {tmp_path},", str(error), "gcc, python3-dev", "TRITON_CACHE_DIR"):
        assert part in message
    assert told.value.__cause__ is error


def test_other_errors_of_a_launch_are_raised_as_they_are():
    error = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    with pytest.raises(RuntimeError) as told:
        launch(kernel_that_raises(error), (1,))
    assert told.value is error
