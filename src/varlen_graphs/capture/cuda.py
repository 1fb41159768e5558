"""Capture as CUDA graphs."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.capture.lines import raising_line
from varlen_graphs.capture.memory import left_to_pool
from varlen_graphs.capture.memsets import memsets_to_kernels
from varlen_graphs.capture.pool import Pool
from varlen_graphs.errors import CaptureError


class CudaGraph:
    """A captured CUDA graph. Replays on the current stream."""

    def __init__(self, graph: torch.cuda.CUDAGraph, name: str, outputs: list[Tensor]) -> None:
        self.outputs = outputs
        self._graph = graph
        self._name = name

    def replay(self) -> None:
        """Launch the graph; returns before it has run."""
        torch.cuda.nvtx.range_push(self._name)
        self._graph.replay()
        torch.cuda.nvtx.range_pop()


class CudaCapture:
    """Captures into one pool, on the pool's stream, in `thread_local` mode: other threads may go on using the GPU.

    Warm-up runs belong on another stream: what cuBLAS allocates for the pool's stream then comes from the pool, at the
    first capture, and lives as long as the pool does.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def capture(self, run: Callable[[], list[Tensor]], name: str) -> CudaGraph:
        """Capture one `run`, which was run before for warm-up.

        Raises:
            CaptureError: CUDA refuses something in `run`, or has no memory left. The original error is its cause.
        """
        with _collector_paused(), torch.cuda.device(self._pool.device):
            graph, handle, stream = self._pool.new_graph()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                try:
                    graph.capture_begin(pool=handle, capture_error_mode="thread_local")
                    try:
                        outputs = run()
                    finally:
                        self._end(graph, handle)
                    memsets_to_kernels(graph, stream)
                    graph.instantiate()
                except RuntimeError as error:
                    # The end of a capture that CUDA has invalidated fails too: the error before it is the one to tell.
                    first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
                    remedy = _OUT_OF_MEMORY if isinstance(first, torch.cuda.OutOfMemoryError) else _REFUSED
                    line = raising_line(first.__traceback__)
                    raise CaptureError(f"{name} could not be captured: {first}\n  at {line}\n{remedy}") from error
            self._pool.add(graph)
            torch.cuda.current_stream().wait_stream(stream)
            return CudaGraph(graph, name, left_to_pool(outputs))

    def _end(self, graph: torch.cuda.CUDAGraph, handle: Any) -> None:
        """End a capture, also one that CUDA has invalidated: torch then stops before it has left capture mode."""
        try:
            graph.capture_end()
        except RuntimeError:
            self._pool.abandon_handle()
            device = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(device, handle)
            torch._C._cuda_releasePool(device, handle)
            # Random numbers leave capture mode with the next capture that succeeds.
            healing, scratch = torch.cuda.CUDAGraph(), torch.zeros(1, device=device)
            torch.cuda.current_stream().synchronize()
            healing.capture_begin(capture_error_mode="thread_local")
            scratch.add_(1)
            healing.capture_end()
            raise


_OUT_OF_MEMORY = "Give the encoder a smaller largest budget, or free memory first."
_REFUSED = (
    "A graph holds only work that is queued on the GPU: no .item(), .tolist() or .cpu(), no shape that depends on "
    "data, no copy from pageable memory. vg.diagnose(module, call) names every such line, and the buffer to declare in "
    "its place."
)


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
