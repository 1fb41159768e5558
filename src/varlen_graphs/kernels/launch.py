"""Launches of Triton kernels, which may compile in other threads first."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from subprocess import CalledProcessError
from typing import Any

from varlen_graphs.errors import CompilerError
from varlen_graphs.kernels.start import hashing

MOST_THREADS = 16
"""Number of kernels that compile at a time, at most: a tower takes about as many."""

LOADED_S = 0.02
"""Seconds that a launch waits for its kernel, which takes far less to load from Triton's cache, and more to compile."""

_in_threads: ContextVar["Compilation | None"] = ContextVar("varlen_graphs_compiling", default=None)


class Compilation:
    """State of a `compiling_in_threads`.

    Attributes:
        used_references: True if some kernel was not compiled yet, so that its reference ran.
    """

    used_references = False


class Compiling(Exception):  # noqa: N818 - no error
    """A kernel is not compiled yet, which other threads see to: its operator runs its reference meanwhile."""


@contextmanager
def compiling_in_threads() -> Iterator[Compilation]:
    """Compile kernels in threads, and run the references of their operators meanwhile, for calls inside of this thread.

    Waits at the end until all are compiled, and until Triton has started if it is starting. An error of the compiler is
    raised by the next launch of the kernel.
    """
    compilation = Compilation()
    try:
        from triton import knobs
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
    except ImportError:  # no Triton, or a version that compiles kernels one by one
        yield compilation
        return
    if knobs.runtime.interpret or active_mode.get() is not None:  # nothing compiles, or already so
        yield _in_threads.get() or compilation
        return
    threads, before = min(MOST_THREADS, os.cpu_count() or 1), active_mode.set(None)
    try:
        with ThreadPoolExecutor(threads, "varlen_graphs compiles") as pool, AsyncCompileMode(pool, ignore_errors=True):
            token = _in_threads.set(compilation)
            try:
                yield compilation
            finally:
                _in_threads.reset(token)
    finally:
        active_mode.reset(before)  # an interrupt may have left the mode
        if (start := hashing()) is not None:
            start.join()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel of Triton on the current device.

    Raises:
        Compiling: It is being compiled, or Triton is starting, inside `compiling_in_threads`.
        CompilerError: Triton has to build what launches it, and there is no compiler.
    """
    try:
        compilation = _in_threads.get()
        if (start := hashing()) is not None:
            if compilation is not None:
                compilation.used_references = True
                raise Compiling
            start.join()
        if compilation is not None:
            compiled = kernel.warmup(*args, grid=grid, **options)  # compiled, or the future of that
            future = getattr(compiled, "future", None)
            if future is not None and not wait([future], timeout=LOADED_S).done:
                compilation.used_references = True
                raise Compiling
        kernel[grid](*args, **options)
    except Exception as error:
        if not _is_of_compiler(error):
            raise
        raise CompilerError(
            f"a kernel is not in Triton's cache, {_cache_folder()}, and Triton could not build what launches it "
            f"({error}): install a C compiler and Python's headers (gcc, python3-dev), or bring the cache of a process "
            "that had them, in a folder of the same path, and name it in TRITON_CACHE_DIR"
        ) from error


def _is_of_compiler(error: Exception) -> bool:
    """Return True for what Triton raises without a C compiler, with one that fails, or without /sbin/ldconfig."""
    return isinstance(error, CalledProcessError | FileNotFoundError) or "Failed to find C compiler" in str(error)


def _cache_folder() -> str:
    from triton import knobs

    return str(knobs.cache.dir)
