"""Triton's start: for the keys of its cache it hashes its own files, some 500 MB, which takes a third of a second."""

import os
from collections.abc import Iterable
from contextlib import suppress
from threading import Lock, Thread

from torch import Tensor


def _hash_files() -> None:
    with suppress(Exception):  # another version of Triton, or what the first launch raises again
        from triton.runtime.cache import triton_key

        triton_key()  # keeps the result


_thread: Thread | None = None  # made when it starts: one from before a fork would count as ended in the child
_lock = Lock()

if hasattr(os, "register_at_fork"):  # the thread that held it does not exist in the child
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


def start_triton(weights: Iterable[Tensor]) -> None:
    """Import Triton and let it hash its files in a thread, if any weights are on a GPU; does so once in a process.

    Encoders begin with it, so that it is done, or nearly so, when a call needs its first kernel.
    """
    if not any(weight.is_cuda for weight in weights):
        return
    global _thread
    with _lock, suppress(Exception):  # no Triton, a broken one, or no thread for it: the first launch tells
        if _thread is None:
            import triton  # noqa: F401 - ahead of the thread, so that no two import it at a time

            _thread = Thread(target=_hash_files, name="varlen_graphs starts Triton")
            _thread.start()


def hashing() -> Thread | None:
    """Return the thread while it hashes, which a launch would do once more."""
    return _thread if _thread is not None and _thread.is_alive() else None
