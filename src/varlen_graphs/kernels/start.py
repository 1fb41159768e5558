"""Triton's start: for the keys of its cache it hashes its own files, some 500 MB, which takes a third of a second."""

import os
from collections.abc import Iterable
from threading import Lock, Thread

from torch import Tensor

_lock = Lock()
_threads: list[Thread] = []
"""The one thread that hashes, or has; none if there is nothing to hash."""

if hasattr(os, "register_at_fork"):  # the thread that held it does not exist in the child
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


def start_triton(weights: Iterable[Tensor]) -> None:
    """Import Triton and let it hash its files in a thread, if any weights are on a GPU; does so once in a process.

    Encoders begin with it, so that it is done, or nearly so, when a call needs its first kernel.
    """
    if not _threads and any(weight.is_cuda for weight in weights):
        _start()


def hashing(*, begin: bool = False) -> Thread | None:
    """Return the thread while it hashes, which a launch would do once more. If `begin`, it begins unless it has."""
    if begin and not _threads:
        _start()
    for thread in _threads:
        if thread.is_alive():
            return thread
    return None


def _start() -> None:
    with _lock:
        if _threads:
            return
        thread = Thread(target=_hash_files, name="varlen_graphs starts Triton")
        try:
            import triton  # noqa: F401 - ahead of the thread, so that no two import it at a time

            thread.start()
        except Exception:  # no Triton, or a broken one, or no thread: the first launch tells
            thread = Thread()  # which never runs
        _threads.append(thread)


def _hash_files() -> None:
    try:
        from triton.runtime.cache import triton_key

        triton_key()  # keeps the result
    except Exception:  # another version, or what the first launch raises again
        return
