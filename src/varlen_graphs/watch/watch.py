"""Watching a run: what a CUDA graph cannot hold is refused by the line that does it, before anything is captured."""

import threading
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from varlen_graphs.errors import CaptureError
from varlen_graphs.watch.lines import UNKNOWN, user_lines
from varlen_graphs.watch.rules import (
    WHY,
    Offence,
    function_offence,
    has_storage,
    makes_on_host,
    operator_offence,
    transfer_offence,
)
from varlen_graphs.watch.sharded import is_wrapper, local

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

    def refuse(self, offence: Offence) -> None:
        """Called at each offence: raises, naming the user's line."""
        why, remedy = WHY[offence.kind]
        raise CaptureError(
            f"{self._name} could not be captured: {offence.what}\n  at {next(user_lines(), UNKNOWN)}\n{why} {remedy}"
            "\nvg.diagnose(module, call) lists all that stands in the way."
        )

    def refuse_function(self, offence: Offence, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called in the place of a function that offends, for its result."""
        self.refuse(offence)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Call a function that does not offend; one that takes no tensors may make host tensors."""
        result = func(*args, **kwargs)
        if not tensors and makes_on_host(kwargs):
            for made in tree_leaves(result):
                if isinstance(made, Tensor):
                    self.mark_host(made)
        return result

    def mark_host(self, tensor: Tensor) -> None:
        """Remember that a tensor would be on the host, on a machine where the module is on a GPU."""
        tensor = local(tensor)
        if has_storage(tensor):
            self._made_on_host[tensor.untyped_storage()._cdata] = tensor.detach()

    def is_host(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the host, or would be."""
        if self._device.type != "cpu":
            return tensor.device.type == "cpu"
        if not has_storage(tensor):
            return False
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # has no storage; comes of tensors that were seen
            return False
        return local(tensor).untyped_storage()._cdata in self._made_on_host

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented  # until it has become operations on what this rank has, which come here in turn
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_host = [tensor for tensor in inputs if self.is_host(tensor)]
        all_on_host = bool(inputs) and len(on_host) == len(inputs)
        offence = transfer_offence(func, args, kwargs)
        if offence is None and not all_on_host:
            offence = operator_offence(func, args, kwargs, on_host, self.is_host)
        if offence is not None:
            self.refuse(offence)
        self.inside += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self.inside -= 1
        results = [local(leaf) if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(result)]
        if self._device.type == "cpu" and (all_on_host or func is aten.lift_fresh.default):
            for tensor in results:
                if isinstance(tensor, Tensor):
                    self.mark_host(tensor)
        elif not all(has_storage(tensor) for tensor in (*inputs, *results) if isinstance(tensor, Tensor)):
            self.refuse(Offence("sparse tensor", f"{func} takes or makes a tensor that is sparse or nested"))
        elif not all_on_host:
            self.seen(func, args, kwargs, inputs, results)
        return result


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
        offence = function_offence(func, args, kwargs, tensors, watch.is_host)
        if offence is not None:
            return watch.refuse_function(offence, func, args, kwargs)
        return watch.call(func, args, kwargs, tensors)
