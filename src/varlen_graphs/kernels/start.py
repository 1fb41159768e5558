"""Triton's start: for the keys of its cache it hashes its own files, some 500 MB, which takes a third of a second."""

from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from threading import Thread

from torch import Tensor


def start_triton(weights: Iterable[Tensor]) -> None:
    """Import Triton and let it hash its files in a thread, if any weights are on a GPU; does so once in a process.

    Encoders begin with it, so that it is done, or nearly so, when a call needs its first kernel.
    """
    if any(weight.is_cuda for weight in weights):
        _start()


def starting() -> Thread | None:
    """Return the thread while it hashes, which a launch would do once more; begins with it if no encoder has."""
    thread = _start()
    return thread if thread is not None and thread.is_alive() else None


@cache
def _start() -> Thread | None:
    try:
        from triton.runtime.cache import triton_key
    except ImportError:  # no Triton, or a version that has this elsewhere
        return None

    def hash_files() -> None:
        with suppress(Exception):  # the first launch raises it again
            triton_key()  # keeps the result

    thread = Thread(target=hash_files, name="varlen_graphs starts Triton")
    thread.start()
    return thread
