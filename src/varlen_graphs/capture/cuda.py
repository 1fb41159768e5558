"""Capture backend for CUDA graphs."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.capture.driver import private_stream, spare_captures
from varlen_graphs.capture.memory import forget_frames, is_out_of_memory, release_to_pool
from varlen_graphs.capture.memsets import memsets_to_kernels
from varlen_graphs.capture.pool import Pool
from varlen_graphs.errors import CaptureError
from varlen_graphs.torch_dispatch.host_constants import ConstantsMode, HostConstant
from varlen_graphs.torch_dispatch.lines import raising_line


class CudaGraph:
    """A captured CUDA graph. Replays on the current stream.

    Attributes:
        cuda_graph: The torch graph.
        outputs: Aliases of the outputs.
        bytes: Drop of free device memory while the graph was instantiated; work of others may count in.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, name: str, outputs: list[Tensor], taken: int) -> None:
        self.outputs = outputs
        self.bytes = taken
        self.cuda_graph = graph
        self._name = name

    def __del__(self) -> None:
        # The collector may end an encoder while this thread captures something of the caller's. A forked process, where
        # CUDA does not work, frees nothing.
        with spare_captures(), suppress(RuntimeError):
            self.cuda_graph.reset()

    def replay(self) -> None:
        """Launch the graph, without waiting for it to run."""
        torch.cuda.nvtx.range_push(self._name)
        self.cuda_graph.replay()
        torch.cuda.nvtx.range_pop()


class CudaCapture:
    """Captures into one pool, on the pool's stream, in `thread_local` mode: other threads may go on using the GPU.

    Warm-up must run on another stream: the workspace that cuBLAS allocates for the pool's stream then comes from the
    pool, at the first capture, and lives as long as the pool does.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def capture(self, run: Callable[[], list[Tensor]], name: str, constants: Sequence[HostConstant] = ()) -> CudaGraph:
        """Capture one call of `run`, after it has run for warm-up.

        With constants, it runs under a dispatch mode, and code under `torch.compile` runs uncompiled.

        A capture that another thread invalidates is retried once. So is one that runs out of memory, because a capture
        cannot free the memory that the allocator caches.

        Other threads may draw random numbers on the GPU meanwhile, unless `run` draws some itself: then, and while a
        capture begins, their draws raise where `_release_generator` matters.

        Raises:
            CaptureError: CUDA refuses something in `run`, and the original error is its cause; or a host tensor that
                it copies to the device differs from the constant of the warm-up run.
            torch.OutOfMemoryError: The device is out of memory.
        """
        if constants:
            mode = ConstantsMode(constants[0].on_device.device, name, constants)
            run = partial(mode.watch, run, fast_paths=False)
        draws, may_retry = False, True
        with _collector_paused(), torch.cuda.device(self._pool.device):
            while True:
                try:
                    return self.capture_once(run, name, draws)
                except RuntimeError as error:
                    if not draws and _DRAWS in str(error):
                        draws = True
                    elif may_retry and _is_transient(error):
                        may_retry = False
                    elif isinstance(error, torch.OutOfMemoryError | CaptureError):
                        raise
                    else:
                        raise _capture_error(error, name) from error
                    forget_frames(error)
                torch.cuda.empty_cache()

    def capture_once(self, run: Callable[[], list[Tensor]], name: str, draws: bool) -> CudaGraph:
        """Capture one call of `run` without a retry; with `draws` it may draw random numbers."""
        graph, handle, stream = self._pool.new_graph()
        stream.wait_stream(torch.cuda.current_stream())
        scratch = torch.zeros(1, device=self._pool.device)
        spare = private_stream(scratch.device.index)  # made here, because a capture may not allow that
        with torch.cuda.stream(stream):
            try:
                graph.capture_begin(pool=handle, capture_error_mode="thread_local")
                released = None if draws else _release_generator(spare, scratch)  # kept, to be freed after the capture
                outputs = run()
                self._end(graph, handle)
            except BaseException:  # an interrupt must not leave the stream capturing either
                if torch.cuda.is_current_stream_capturing():
                    with suppress(RuntimeError):  # an invalid capture; its cause propagates
                        self._end(graph, handle)
                with suppress(RuntimeError):
                    _release_generator(spare, scratch)
                raise
            del released
            memsets_to_kernels(graph, stream)
            free, _ = torch.cuda.mem_get_info()
            graph.instantiate()
            taken = max(0, free - torch.cuda.mem_get_info()[0])
        self._pool.add(graph, handle)
        torch.cuda.current_stream().wait_stream(stream)
        return CudaGraph(graph, name, release_to_pool(outputs), taken)

    def _end(self, graph: torch.cuda.CUDAGraph, handle: Any) -> None:
        """End a capture, even one that CUDA has invalidated: torch then raises before it has left capture mode."""
        try:
            graph.capture_end()
        except RuntimeError:
            self._pool.abandon_handle()
            device = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(device, handle)
            torch._C._cuda_releasePool(device, handle)
            raise


_DRAWS = "generator not in capture mode"
"""Part of torch's error for a capture that draws from a generator that is not registered with it."""


def _release_generator(spare: torch.cuda.Stream, scratch: Tensor) -> torch.cuda.CUDAGraph:
    """Take the default generator out of capture mode, by a capture of next to nothing; return that.

    In torch 2.11 each capture puts the default generator into capture mode, where draws outside of it raise, and the
    end of any capture takes it out again; in torch 2.13 captures leave it alone, and this changes nothing. Lending the
    generator another state for a moment instead would hand out numbers of another seed.
    """
    short = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(spare):
        try:
            short.capture_begin(capture_error_mode="thread_local")
            scratch.zero_()  # torch warns of an empty graph
        finally:
            if torch.cuda.is_current_stream_capturing():
                short.capture_end()
    return short


def _is_transient(error: RuntimeError) -> bool:
    """Return True if a retry may succeed. An error of `run` itself is raised at once, not as a previous error."""
    return is_out_of_memory(error) or "previous error during capture" in str(error)


def _capture_error(error: RuntimeError, name: str) -> CaptureError:
    line = raising_line(error.__traceback__)
    return CaptureError(f"{name} could not be captured: {error}\n  at {line}\n{_REFUSED}")


_REFUSED = (
    "A graph holds only work that is queued on the GPU: no .item(), .tolist() or .cpu(), no shape that depends on "
    "data, no copy from pageable memory. vg.diagnose(module, call) names every such line, and the buffer to declare "
    "instead."
)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector: freeing a CUDA object during a capture would invalidate it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
