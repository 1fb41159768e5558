"""Capture as CUDA graphs."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from varlen_graphs.capture.pool import Pool
from varlen_graphs.errors import CaptureError

_CAPTURING = threading.Lock()
"""One capture at a time in a process."""


class CudaGraph:
    """A captured CUDA graph. Replays on the current stream."""

    def __init__(self, graph: torch.cuda.CUDAGraph, name: str) -> None:
        self._graph = graph
        self._name = name

    def replay(self) -> None:
        """Launch the graph; returns before it has run."""
        torch.cuda.nvtx.range_push(self._name)
        self._graph.replay()
        torch.cuda.nvtx.range_pop()


class CudaCapture:
    """Captures into one pool, on the pool's stream, in `thread_local` mode: other threads may go on using the GPU."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def capture(self, run: Callable[[], None], name: str) -> CudaGraph:
        """Warm `run` up on the capture stream, then capture it.

        Raises:
            CaptureError: CUDA refuses something in `run`: a host sync, a copy from pageable memory, a new library
                handle. The original error is its cause.
        """
        graph, handle = self._pool.new_graph()
        stream = self._pool.stream
        with _CAPTURING, _collector_paused(), torch.cuda.device(self._pool.device):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run()
                stream.synchronize()
                graph.capture_begin(pool=handle, capture_error_mode="thread_local")
                try:
                    run()
                except BaseException as error:
                    _abandon(graph)
                    if isinstance(error, RuntimeError):
                        raise CaptureError(_EXPLANATION.format(name=name, error=error)) from error
                    raise
                try:
                    graph.capture_end()
                except RuntimeError as error:
                    raise CaptureError(_EXPLANATION.format(name=name, error=error)) from error
            torch.cuda.current_stream().wait_stream(stream)
        return CudaGraph(graph, name)


_EXPLANATION = (
    "{name} could not be captured: {error}\n"
    "A graph holds only work that is queued on the GPU: no .item(), .tolist() or .cpu(), no shape that depends on "
    "data, no copy from pageable memory. Run the module with backend='tape' on the CPU to see the first such line by "
    "name, and declare what it computes as a buffer."
)


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture that failed, so that the stream and the allocator leave capture mode."""
    with suppress(RuntimeError):  # an invalidated capture says so again; the first error is the one to raise
        graph.capture_end()


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep the garbage collector from freeing a CUDA object during a capture, which would invalidate it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
