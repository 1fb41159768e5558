"""The tape: what a CUDA graph does, on the CPU, for tests without a GPU.

The tape records the operations that one run dispatches, and replays them over the same storages with no Python of the
module running. So whatever a graph freezes is frozen, whatever a graph computes anew is computed anew, and what a
capture refuses is refused, by the line that does it (see `Watch`). A host tensor without dimensions is frozen, as on a
GPU. Triton kernels are seen as operators of torch; a raw launch is refused.

Before each replay every storage that the run allocated is poisoned, so that memory nobody writes is seen.

Not modelled: the reuse of memory inside a pool, streams, and `torch.compile`.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from varlen_graphs.capture.collectives import is_collective, waiting
from varlen_graphs.capture.memory import poison
from varlen_graphs.watch.launches import triton_launches
from varlen_graphs.watch.rules import Offence
from varlen_graphs.watch.watch import Watch

aten = torch.ops.aten

_UNWRITTEN = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
"""Operations that only allocate: a replay leaves their memory as it is."""


@dataclass
class _Operation:
    """One recorded operation, and the storages its results go to (`None`: already in place)."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor | None]


class Tape:
    """A recorded run."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.operations: list[_Operation] = []
        self.allocated: list[Tensor] = []
        self.made: list[weakref.ref[Tensor]] = []

    def __len__(self) -> int:
        """How many operations a replay runs."""
        return len(self.operations)

    @property
    def bytes(self) -> int:
        """What the run allocated: a tape shares no memory."""
        return sum(tensor.nbytes for tensor in self.allocated)

    def replay(self) -> None:
        """Run the recorded operations again, over the same memory, which is poisoned first."""
        with torch.inference_mode(False), torch.no_grad():
            for tensor in self.allocated:
                poison(tensor)
            for operation in self.operations:
                results = tree_leaves(operation.function(*operation.args, **operation.kwargs))
                for static, result in zip(operation.results, results, strict=True):
                    if static is not None:
                        static.copy_(result)


class TapeCapture:
    """Records on the CPU."""

    def capture(self, run: Callable[[], list[Tensor]], name: str) -> Tape:
        """Record one `run`, which was run before for warm-up.

        Raises:
            CaptureError: `run` does something that a CUDA graph cannot hold; the message names the line.
        """
        tape = Tape()
        recorder = _Recorder(tape, name)
        with torch.inference_mode(False), torch.no_grad(), recorder, triton_launches(recorder.launching):
            tape.outputs = run()
        return tape

    def kept(self, graphs: Sequence[Tape]) -> list[Tensor]:
        """Tensors, views too, of memory that recorded runs allocated, which somebody beside the tapes keeps."""
        kept = []
        for tape in graphs:
            outputs = set(map(id, tape.outputs))
            alive = (tensor for reference in tape.made if (tensor := reference()) is not None)
            kept += [tensor for tensor in alive if id(tensor) not in outputs]
        return kept


class _Recorder(Watch):
    """Writes dispatched operations to a tape."""

    def __init__(self, tape: Tape, name: str) -> None:
        super().__init__(torch.device("cpu"), name)
        self._tape = tape
        self._own: set[int] = set()  # the storages that the run allocated

    def seen(
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
        self._own.update(static.untyped_storage()._cdata for static in fresh_results)
        self._tape.made += [
            weakref.ref(result)
            for result in results
            if isinstance(result, Tensor) and result.untyped_storage()._cdata in self._own
        ]
        mutable = isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable
        if func in _UNWRITTEN or not (fresh_results or mutable):
            return  # an allocation, or a view
        args, kwargs = tree_map_only(Tensor, self._alias, (args, kwargs))
        if is_collective(func):
            func = waiting(func)  # the operation that waits for it gives the memory it takes, so it is not recorded
        self._tape.operations.append(_Operation(func, args, kwargs, statics))

    def launching(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """Refuse a Triton launch that no operator announces: the tape would miss what it writes."""
        if not self.inside and self.thread == threading.get_ident():
            what = f"it launches the Triton kernel {getattr(kernel, '__name__', kernel)!r} outside of any operator"
            self.refuse(Offence("raw kernel", what))
        return nullcontext()

    def _alias(self, tensor: Tensor) -> Tensor:
        """What a graph would keep of an argument: the memory of a device tensor, the value of a host scalar."""
        return tensor.clone() if self.is_host(tensor) else tensor.detach()
