"""The tape: what a CUDA graph does, on the CPU, for tests without a GPU.

The tape records the operations that one run dispatches, and replays them over the same storages with no Python of the
module running. So whatever a graph freezes is frozen, whatever a graph computes anew is computed anew, and what a
capture refuses is refused, by the line that does it:

- copies to the host and branches on values (`.item()`, `.tolist()`, `.cpu()`, `bool(tensor)`), and shapes that depend
  on data (`nonzero`, boolean indexing);
- host tensors mixed with device rows. All tensors are on the CPU here, so the tape tells the two apart by how they
  were made: a factory without `device=`, `torch.tensor` and `from_numpy` make host tensors. One without dimensions is
  frozen, as on a GPU; another is refused;
- Triton kernels launched without a custom op around them.

Before each replay every storage that the run allocated is poisoned, so that memory nobody writes is seen.

Not modelled: the reuse of memory inside a pool, streams, and `torch.compile`.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from varlen_graphs.capture.memory import poison
from varlen_graphs.capture.rules import copies_to_device, reads_on_host, shape_depends_on_data
from varlen_graphs.errors import CaptureError

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
        self._operations: list[_Operation] = []
        self._allocated: list[Tensor] = []

    def __len__(self) -> int:
        """How many operations a replay runs."""
        return len(self._operations)

    def replay(self) -> None:
        """Run the recorded operations again, over the same memory, which is poisoned first."""
        with torch.inference_mode(False), torch.no_grad():
            for tensor in self._allocated:
                poison(tensor)
            for operation in self._operations:
                results = tree_leaves(operation.function(*operation.args, **operation.kwargs))
                for static, result in zip(operation.results, results, strict=True):
                    if static is not None:
                        static.copy_(result)


class TapeCapture:
    """Records on the CPU."""

    def capture(self, run: Callable[[], None], name: str) -> Tape:
        """Record one `run`.

        Raises:
            CaptureError: `run` does something that a CUDA graph cannot hold; the message names the line.
        """
        tape = Tape()
        with torch.inference_mode(False), torch.no_grad():
            run()
            with _Recorder(tape, name) as recorder, _Functions(recorder), _no_raw_triton(recorder):
                run()
        return tape


class _Recorder(TorchDispatchMode):
    """Writes dispatched operations to a tape."""

    def __init__(self, tape: Tape, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name
        self.inside = 0
        self._tape = tape
        self._host: dict[int, Tensor] = {}  # by storage; the tensor keeps the storage alive, so the key stays unique

    def refuse(self, what: str, remedy: str) -> NoReturn:
        raise CaptureError(f"{self.name} could not be captured: {what}\n  at {_user_line()}\n{remedy}")

    def mark_host(self, tensor: Tensor) -> None:
        self._host[tensor.untyped_storage()._cdata] = tensor.detach()

    def is_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._host

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_host = [tensor for tensor in tensors if self.is_host(tensor)]
        all_on_host = bool(tensors) and len(on_host) == len(tensors)
        if not all_on_host:
            self._check(func, args, kwargs, on_host)
        self.inside += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self.inside -= 1
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if all_on_host or func is aten.lift_fresh.default:
            for tensor in results:
                self.mark_host(tensor)
        else:
            self._record(func, args, kwargs, tensors, tree_leaves(result))
        return result

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_host: list[Tensor]) -> None:
        if func is aten._local_scalar_dense.default:
            self.refuse("it reads a value on the host", _READ_REMEDY)
        if shape_depends_on_data(func, args, kwargs):
            self.refuse(
                f"the shape of {func}'s result depends on data, which the host would have to wait for",
                "Compute with masks of a fixed shape (torch.where), or declare a buffer of a fixed capacity.",
            )
        if func is aten.copy_.default and on_host:
            self.refuse("it copies a host tensor to the device", _COPY_REMEDY)
        for tensor in on_host:
            if tensor.dim():
                self.refuse(
                    f"{func} mixes device tensors with a host tensor {list(tensor.shape)}",
                    "Create it on the device (device=x.device), or register it as a buffer of the module.",
                )

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], results: list[Any]
    ) -> None:
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        statics: list[Tensor | None] = []
        for result in results:
            fresh = isinstance(result, Tensor) and result.untyped_storage()._cdata not in known
            statics.append(result.detach() if fresh else None)
        fresh_results = [static for static in statics if static is not None]
        self._tape._allocated += fresh_results
        if func in _UNWRITTEN or not (fresh_results or func._schema.is_mutable):
            return  # an allocation, or a view
        args, kwargs = tree_map_only(Tensor, self._alias, (args, kwargs))
        self._tape._operations.append(_Operation(func, args, kwargs, statics))

    def _alias(self, tensor: Tensor) -> Tensor:
        """What a graph would keep of an argument: the memory of a device tensor, the value of a host scalar."""
        return tensor.clone() if self.is_host(tensor) else tensor.detach()


class _Functions(TorchFunctionMode):
    """Watches what never reaches dispatch on the CPU: reads by the host, and how tensors are made."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        recorder = self._recorder
        leaves, _ = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if recorder.inside:
            return func(*args, **kwargs)
        if tensors and not recorder.is_host(tensors[0]) and (what := reads_on_host(func)):
            recorder.refuse(f"{what} reads a tensor on the host", _READ_REMEDY)
        if copies_to_device(func, args, kwargs, bool(tensors) and recorder.is_host(tensors[0])):
            recorder.refuse("it copies a host tensor to the device", _COPY_REMEDY)
        result = func(*args, **kwargs)
        if not tensors and kwargs.get("device") is None:
            for made in tree_leaves(result):
                if isinstance(made, Tensor):
                    recorder.mark_host(made)
        return result


_READ_REMEDY = (
    "The host does not run at a replay, so the value would be frozen. Keep it a tensor, or declare what is computed "
    "from it as a buffer (for a longest segment: MaxSeqlen)."
)
_COPY_REMEDY = (
    "Such a copy is not allowed in a capture. Create the tensor on the device (torch.full, torch.arange with device=), "
    "register it as a buffer of the module, or declare a HostBuffer."
)


@contextmanager
def _no_raw_triton(recorder: _Recorder) -> Iterator[None]:
    """Refuse Triton launches that no custom op announces: the tape would miss what they write."""
    classes = []
    if "triton" in sys.modules:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        classes = [InterpretedFunction, JITFunction]
    originals = [cls.run for cls in classes]

    def guarded(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.inside:
                recorder.refuse(
                    f"it launches the Triton kernel {getattr(self, '__name__', self)!r} outside of any operator",
                    "Wrap the launch in torch.library.custom_op, with a fake kernel; torch.compile needs that too.",
                )
            return original(self, *args, **kwargs)

        return run

    for cls, original in zip(classes, originals, strict=True):
        cls.run = guarded(original)
    try:
        yield
    finally:
        for cls, original in zip(classes, originals, strict=True):
            cls.run = original


_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def _user_line() -> str:
    """The innermost line of the stack that is neither torch's nor the tape's."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_LIBRARIES):
            return f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"
    return "an unknown line"
