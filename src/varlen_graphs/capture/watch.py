"""Watching a run: what a CUDA graph cannot hold is refused by the line that does it, before anything is captured."""

import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from varlen_graphs.capture.rules import (
    copies_to_device,
    copies_to_host,
    makes_on_host,
    reads_on_host,
    shape_depends_on_data,
    written_arguments,
)
from varlen_graphs.errors import CaptureError

aten = torch.ops.aten


class Watch(TorchDispatchMode):
    """Refuses, while a run is watched, what cannot be part of a graph.

    Code under `torch.compile` runs uncompiled while it is watched, or the compiler would give it up for good.

    On a GPU a host tensor is one on the CPU. Where the module itself is on the CPU (the tape), host tensors are told by
    how they were made: a factory without `device=`, `torch.tensor` and `from_numpy` make host tensors.

    Args:
        device: Where the module is.
        name: What messages call the run.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside = 0
        self.thread = threading.get_ident()
        self._device = device
        self._name = name
        self._made_on_host: dict[int, Tensor] = {}  # by storage, kept alive, so that the key stays unique
        self._functions: Any = None
        self._stance: Any = None

    def __enter__(self) -> Any:
        """Watch the calling thread."""
        self.thread = threading.get_ident()
        self._stance = torch.compiler.set_stance("force_eager")
        self._stance.__enter__()
        self._functions = _Functions(self)
        self._functions.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Stop watching."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._functions.__exit__(*error)
        self._functions = None  # it refers to this, and what was watched must not wait for a collection
        self._stance.__exit__(*error)

    def seen(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], results: list[Any]
    ) -> None:
        """Called after each operation on the device."""

    def refuse(self, what: str, remedy: str) -> NoReturn:
        """Raise, naming the user's line."""
        raise CaptureError(
            f"{self._name} could not be captured: {what}\n  at {user_line(traceback.extract_stack())}\n{remedy}"
        )

    def mark_host(self, tensor: Tensor) -> None:
        """Remember that a tensor would be on the host, on a machine where the module is on a GPU."""
        self._made_on_host[tensor.untyped_storage()._cdata] = tensor.detach()

    def is_host(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the host, or would be."""
        if self._device.type != "cpu":
            return tensor.device.type == "cpu"
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # has no storage; comes of tensors that were seen
            return False
        return tensor.untyped_storage()._cdata in self._made_on_host

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_host = [tensor for tensor in inputs if self.is_host(tensor)]
        all_on_host = bool(inputs) and len(on_host) == len(inputs)
        if func is aten._to_copy.default:
            self._check_transfer(inputs[0], kwargs.get("device"))
        if not all_on_host and isinstance(func, torch._ops.OpOverload):
            self._check(func, args, kwargs, on_host)
        self.inside += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self.inside -= 1
        results = tree_leaves(result)
        if self._device.type == "cpu" and (all_on_host or func is aten.lift_fresh.default):
            for tensor in results:
                if isinstance(tensor, Tensor):
                    self.mark_host(tensor)
        elif not all_on_host:
            self.seen(func, args, kwargs, inputs, results)
        return result

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_host: list[Tensor]) -> None:
        if func is aten._local_scalar_dense.default:
            self.refuse("it reads a value on the host", READ_REMEDY)
        if shape_depends_on_data(func, args, kwargs, self.is_host):
            self.refuse(
                f"the shape of {func}'s result depends on data, which the host would have to wait for",
                "Compute with masks of a fixed shape (torch.where), or declare a buffer of a fixed capacity.",
            )
        if any(self.is_host(tensor) for tensor in written_arguments(func, args, kwargs)):
            self.refuse(f"{func} writes a device tensor into a host tensor", READ_REMEDY)
        if func is aten.copy_.default and on_host and not on_host[0].is_pinned():
            self.refuse("it copies a host tensor to the device", COPY_REMEDY)
        for tensor in on_host:
            if tensor.dim() and func is not aten.copy_.default:
                self.refuse(
                    f"{func} mixes device tensors with a host tensor {list(tensor.shape)}",
                    "Create it on the device (device=x.device), or register it as a buffer of the module.",
                )

    def _check_transfer(self, tensor: Tensor, target: torch.device | None) -> None:
        if target is None or target.type == tensor.device.type:
            return
        if target.type == "cpu":
            self.refuse("it copies a device tensor to the host", READ_REMEDY)
        if not tensor.is_pinned():
            self.refuse("it copies a host tensor to the device", COPY_REMEDY)


class _Functions(TorchFunctionMode):
    """Watches what never reaches dispatch on the CPU: reads by the host, and how tensors are made."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        watch = self._watch
        if watch.inside:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        from_host = bool(tensors) and watch.is_host(tensors[0])
        if tensors and not from_host:
            if what := reads_on_host(func):
                watch.refuse(f"{what} reads a tensor on the host", READ_REMEDY)
            if copies_to_host(func, args, kwargs):
                watch.refuse("it copies a device tensor to the host", READ_REMEDY)
        if copies_to_device(func, args, kwargs, from_host and not tensors[0].is_pinned()):
            watch.refuse("it copies a host tensor to the device", COPY_REMEDY)
        result = func(*args, **kwargs)
        if not tensors and makes_on_host(kwargs):
            for made in tree_leaves(result):
                if isinstance(made, Tensor):
                    watch.mark_host(made)
        return result


READ_REMEDY = (
    "The host does not run at a replay, so the value would be frozen. Keep it a tensor, or declare what is computed "
    "from it as a buffer (for a longest segment: MaxSeqlen)."
)
COPY_REMEDY = (
    "Such a copy is not allowed in a capture. Create the tensor on the device (torch.full, torch.arange with device=), "
    "register it as a buffer of the module, or declare a HostBuffer."
)

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def user_line(stack: traceback.StackSummary) -> str:
    """The innermost line of a stack that is neither torch's nor this folder's."""
    for frame in reversed(stack):
        if not frame.filename.startswith(_LIBRARIES):
            return f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"
    return "an unknown line"
