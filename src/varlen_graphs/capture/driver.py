"""Calls of the CUDA driver."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from itertools import count
from typing import Any

import torch

NON_BLOCKING = 1
"""Flag of streams that do not wait for the default stream."""

THREAD_LOCAL, RELAXED = 1, 2
"""Capture modes in which other threads, or all, may go on using the GPU."""


def call_driver(function: str, *arguments: Any) -> None:
    """Call a function of the CUDA driver.

    Raises:
        RuntimeError: It failed.
    """
    error = getattr(driver(), function)(*arguments)
    if error:
        raise RuntimeError(f"{function} failed with CUDA error {error}")


@cache
def driver() -> ctypes.CDLL:
    """Return the library of the CUDA driver."""
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


PRIVATE_STREAMS = 32
"""Number of streams that captures take turns with, as torch has: it keeps a cuBLAS workspace for each."""

_turns = count()


def next_private_stream(device: int) -> torch.cuda.Stream:
    """Return a stream to capture on, which torch gives to nobody: what others queued there would be captured."""
    return private_stream(device, 1 + next(_turns) % PRIVATE_STREAMS)


@cache
def private_stream(device: int, number: int = 0) -> torch.cuda.Stream:
    """Return a stream of this library alone: torch hands out the same 32 again and again. Number 0 is a spare one."""
    handle = c_void_p()
    with torch.cuda.device(device):
        call_driver("cuStreamCreate", byref(handle), c_uint(NON_BLOCKING))
    return torch.cuda.ExternalStream(handle.value, device=device)


@cache
def _copy_to_device() -> Any:
    function = driver().cuMemcpyHtoDAsync_v2
    function.argtypes = c_void_p, c_void_p, c_size_t, c_void_p
    return function


def copy_to_device(target: int, source: int, size: int, stream: int) -> bool:
    """Queue a copy of `size` bytes from an address on the host to one on the device, on a stream given by its handle.

    The device must be the current one. Torch's own copies take twice as long on the host, and tell its allocator of
    pinned memory when they have run, which this does not: keep the source until then. Returns False, and queues
    nothing, if the driver cannot, as in a thread that has not used the device yet.
    """
    return not _copy_to_device()(target, source, size, stream)


def begin_capture(stream: torch.cuda.Stream) -> None:
    """Begin to capture a stream without torch, whose captures take hold of the default random generator."""
    call_driver("cuStreamBeginCapture_v2", c_void_p(stream.cuda_stream), c_int(THREAD_LOCAL))


def end_capture(stream: torch.cuda.Stream) -> c_void_p:
    """End such a capture; return the graph, to be destroyed by `cuGraphDestroy`."""
    graph = c_void_p()
    call_driver("cuStreamEndCapture", c_void_p(stream.cuda_stream), byref(graph))
    return graph


@contextmanager
def spare_captures() -> Iterator[None]:
    """Let this thread wait for the GPU, and destroy graphs, without ending a capture that it or the process makes.

    Errors of the driver are ignored: where it does not work, as in a forked process, nothing is captured.
    """
    mode = c_int(RELAXED)
    exchange = driver().cuThreadExchangeStreamCaptureMode
    exchange(byref(mode))
    try:
        yield
    finally:
        exchange(byref(mode))
