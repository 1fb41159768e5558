"""Layouts on the GPU that the host has not seen: the check inside the graph finds what is wrong, and reads no further."""

import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.support.gpu import on_gpus
from tests.support.untrusted import NEARLY, attack, attacks, device_attacks

pytestmark = on_gpus()


@pytest.mark.parametrize(("name", "layout"), NEARLY.values(), ids=NEARLY.keys())
def test_rows_are_counted_with_care(name, layout):
    attack(name, {"layout": torch.tensor(layout, device="cuda")}, device="cuda")


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(device_attacks())
def test_whatever_a_layout_on_the_gpu_says_is_found_there(case):
    attack_on_the_gpu(case)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(attacks())
def test_whatever_comes_as_a_layout_is_refused_by_name_and_forgotten(case):
    attack(*case, device="cuda")


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on the path")
def test_no_kernel_of_a_graph_reads_or_writes_out_of_bounds():
    code = "import tests.gpu.layouts.test_untrusted as t; t.attack_some()"
    # for its backtraces it keeps the frames of all launches, whose tensors then look like what the module keeps
    sanitizer = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", "--show-backtrace", "no"]
    done = subprocess.run([*sanitizer, sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def attack_on_the_gpu(case):
    name, arguments = case
    attack(name, {argument: value.to("cuda") for argument, value in arguments.items()}, device="cuda")


@settings(max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(device_attacks())
def attack_some(case):
    """The same few for every run under a tool that makes kernels slow."""
    attack_on_the_gpu(case)
