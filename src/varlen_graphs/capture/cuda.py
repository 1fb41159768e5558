"""Capture as CUDA graphs."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.capture.memory import forget_frames, is_out_of_memory, left_to_pool
from varlen_graphs.capture.memsets import memsets_to_kernels
from varlen_graphs.capture.pool import Pool
from varlen_graphs.errors import CaptureError
from varlen_graphs.watch.lines import raising_line


class CudaGraph:
    """A captured CUDA graph. Replays on the current stream.

    Attributes:
        outputs: What the run returned.
        bytes: By how much less memory the device had when the graph was instantiated: others may have been at work.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, name: str, outputs: list[Tensor], taken: int) -> None:
        self.outputs = outputs
        self.bytes = taken
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

        A capture that another thread invalidates is tried once more. So is one that runs out of memory, because a
        capture cannot free what the allocator keeps for others.

        Other threads may draw random numbers on the GPU meanwhile, unless `run` draws some itself: torch's generator
        then belongs to the capture, and theirs fail.

        Raises:
            CaptureError: CUDA refuses something in `run`. The original error is its cause.
            torch.OutOfMemoryError: There is no memory left.
        """
        draws, once_more = False, True
        with _collector_paused(), torch.cuda.device(self._pool.device):
            while True:
                try:
                    return self._capture(run, name, draws)
                except RuntimeError as error:
                    if not draws and _DRAWS in str(error):
                        draws = True
                    elif once_more and _may_pass(error):
                        once_more = False
                    elif isinstance(error, torch.OutOfMemoryError):
                        raise
                    else:
                        raise _told(error, name) from error
                    forget_frames(error)
                torch.cuda.empty_cache()

    def _capture(self, run: Callable[[], list[Tensor]], name: str, draws: bool) -> CudaGraph:
        graph, handle, stream = self._pool.new_graph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            try:
                with nullcontext() if draws else _random_numbers_spared():
                    graph.capture_begin(pool=handle, capture_error_mode="thread_local")
                outputs = run()
                self._end(graph, handle, draws)
            except BaseException:  # an interrupt too must not leave the stream capturing
                if torch.cuda.is_current_stream_capturing():
                    with suppress(RuntimeError):  # that the capture was invalid; what made it so is being told
                        self._end(graph, handle, draws)
                raise
            memsets_to_kernels(graph, stream)
            free, _ = torch.cuda.mem_get_info()
            graph.instantiate()
            taken = max(0, free - torch.cuda.mem_get_info()[0])
        self._pool.add(graph, handle)
        torch.cuda.current_stream().wait_stream(stream)
        return CudaGraph(graph, name, left_to_pool(outputs), taken)

    def kept(self, graphs: Sequence[CudaGraph]) -> list[Tensor]:
        """Tensors that live in the pool; what cuBLAS has there is none. Looks at all objects of the process."""
        outputs = {id(output) for graph in graphs for output in graph.outputs}
        return [tensor for tensor in self._pool.kept() if id(tensor) not in outputs]

    def _end(self, graph: torch.cuda.CUDAGraph, handle: Any, draws: bool) -> None:
        """End a capture, also one that CUDA has invalidated: torch then stops before it has left capture mode."""
        try:
            graph.capture_end()
        except RuntimeError:
            self._pool.abandon_handle()
            device = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(device, handle)
            torch._C._cuda_releasePool(device, handle)
            if draws:  # random numbers leave capture mode with the next capture that succeeds
                healing, scratch = torch.cuda.CUDAGraph(), torch.zeros(1, device=device)
                torch.cuda.current_stream().synchronize()
                healing.capture_begin(capture_error_mode="thread_local")
                scratch.add_(1)
                healing.capture_end()
            raise


_DRAWS = "generator not in capture mode"
"""What torch says where a capture draws random numbers that do not belong to it."""


@contextmanager
def _random_numbers_spared() -> Iterator[None]:
    """Let a capture that begins inside take hold of other random numbers than those that other threads draw.

    Each capture takes hold of the state of the default generator, and the draws of other threads raise until its end.
    """
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    state = default.graphsafe_get_state()
    default.graphsafe_set_state(torch.Generator(default.device))
    try:
        yield
    finally:
        default.graphsafe_set_state(state)


def _may_pass(error: RuntimeError) -> bool:
    """Whether a second try may succeed. What `run` does wrong itself is told at once, and not as a previous error."""
    return is_out_of_memory(error) or "previous error during capture" in str(error)


def _told(error: RuntimeError, name: str) -> CaptureError:
    line = raising_line(error.__traceback__)
    return CaptureError(f"{name} could not be captured: {error}\n  at {line}\n{_REFUSED}")


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
