"""The tape: a capture backend on the CPU with the semantics of CUDA graphs, for tests without a GPU.

The tape records the operations that one run dispatches, and replays them over the same storages without running any
Python of the module. Whatever a graph freezes is frozen, whatever a graph recomputes is recomputed, and whatever a
capture refuses is refused, with the line that does it (see `CaptureRulesMode`). A 0-dimensional host tensor is frozen,
as on a GPU. Triton kernels are recorded as torch operators. What one launched outside of any operator writes is missed:
the check refuses such a graph, because its replays are not what the module gives.

Before each replay every storage that the run allocated is poisoned, so that reads of unwritten memory show.

Not modelled: the reuse of memory inside a pool, streams, and `torch.compile`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from varlen_graphs.capture.collectives import is_collective, run_and_wait
from varlen_graphs.capture.memory import poison
from varlen_graphs.torch_dispatch.host_constants import ConstantsMode, HostConstant
from varlen_graphs.torch_dispatch.leaves import leaves_of

aten = torch.ops.aten

_UNWRITTEN = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
"""Operators that only allocate; a replay skips them."""


@dataclass
class _RecordedOperation:
    """A recorded operation, and the static tensors its results are copied to (`None`: written in place)."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor | None]


class Tape:
    """A recorded run, replayed over the same memory.

    Attributes:
        outputs: Aliases of the outputs.
        operations: The recorded operations, in order.
        allocated: Aliases of all results that the run allocated.
    """

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.operations: list[_RecordedOperation] = []
        self.allocated: list[Tensor] = []

    def __len__(self) -> int:
        """Return the number of operations of a replay."""
        return len(self.operations)

    @property
    def bytes(self) -> int:
        """Memory that the run allocated, in bytes; tapes share none."""
        return sum(tensor.nbytes for tensor in self.allocated)

    def replay(self) -> None:
        """Poison the allocated memory, and run the recorded operations again."""
        with torch.inference_mode(False), torch.no_grad():
            for tensor in self.allocated:
                poison(tensor)
            for operation in self.operations:
                results = leaves_of(operation.function(*operation.args, **operation.kwargs))
                for static, result in zip(operation.results, results, strict=True):
                    if static is not None:
                        static.copy_(result)


class TapeCapture:
    """Capture backend that records tapes on the CPU."""

    def capture(self, run: Callable[[], list[Tensor]], name: str, constants: Sequence[HostConstant] = ()) -> Tape:
        """Record one call of `run`, after it has run for warm-up.

        Raises:
            CaptureError: `run` does something that a CUDA graph cannot hold, or copies a host tensor that differs
                from the constant of the warm-up run; the message names the line.
        """
        tape = Tape()
        recorder = _Recorder(tape, name, constants)
        with torch.inference_mode(False):
            tape.outputs = recorder.watch(run)
        return tape


class _Recorder(ConstantsMode):
    """Records dispatched operations on a tape."""

    def __init__(self, tape: Tape, name: str, constants: Sequence[HostConstant]) -> None:
        super().__init__(torch.device("cpu"), name, constants)
        self._tape = tape

    def begin(self) -> None:
        """Record from the start."""
        super().begin()
        self._tape.operations.clear()
        self._tape.allocated.clear()

    def on_operator(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], results: list[Any]
    ) -> None:
        """Record an operation, unless it only allocates or makes a view."""
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        statics: list[Tensor | None] = []
        for result in results:
            fresh = isinstance(result, Tensor) and result.untyped_storage()._cdata not in known
            statics.append(result.detach() if fresh else None)
        fresh_results = [static for static in statics if static is not None]
        self._tape.allocated += fresh_results
        mutable = isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable
        if func in _UNWRITTEN or not (fresh_results or mutable):
            return  # an allocation, or a view
        args, kwargs = tree_map_only(Tensor, self._alias, (args, kwargs))
        if is_collective(func):
            func = run_and_wait(func)  # the wait operator returns its input, so it is not recorded by itself
        self._tape.operations.append(_RecordedOperation(func, args, kwargs, statics))

    def _alias(self, tensor: Tensor) -> Tensor:
        """Return an alias of a device tensor, whose memory a graph reads, or a copy of a host scalar, frozen by it."""
        return tensor.clone() if self.is_host(tensor) else tensor.detach()
