"""One hypothesis profile and one thread for all tests: speed is measured elsewhere, and CI machines pause.

Without a GPU, Triton's kernels run in its interpreter, which must be said before triton is imported.
"""

import gc
import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Tests are made of small operations, in which threads mostly wait for each other; those of child processes too.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)  # the engines' environments have no xdist
def pytest_xdist_auto_num_workers():
    """Return one process more than there are cores: a tenth of the time tests wait, mostly for child processes."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) + 1


gc.set_threshold(700, 10, 100)  # full collections are rare, others as usual


@pytest.fixture(autouse=True, scope="module")
def frozen_imports():
    """Keep the collector from searching what is imported by now, a million objects, again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def inference():
    """Run a test without gradients, as encoders are called; tests of training enable them."""
    with torch.no_grad():
        yield


settings.register_profile("varlen_graphs", deadline=None, max_examples=20)
settings.register_profile("thorough", deadline=None, max_examples=200)  # `make test ARGS=--hypothesis-profile=thorough`
settings.load_profile("varlen_graphs")
