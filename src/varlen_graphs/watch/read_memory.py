"""Discovery of the memory that graphs read and do not own, and references that keep it alive."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from varlen_graphs.watch.rules import Violation
from varlen_graphs.watch.rules_mode import CaptureRulesMode
from varlen_graphs.watch.sharded import local_tensor


class ReadMemory(CaptureRulesMode):
    """Dispatch mode that collects the tensors that operations read and that the run itself did not create.

    A graph keeps addresses, not tensors, so everything it reads must outlive it: weights, and whatever else the module
    reaches through caches, plain attributes and closures. Tensors that only a raw Triton launch reads are not seen.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        super().__init__(device, name)
        self.held: dict[int, Tensor] = {}  # an alias per storage, by address: keeps it alive unless it is resized
        self.read: dict[int, Tensor] = {}  # the tensors themselves, to detect later changes to them
        self.state: list[Tensor] = []  # uint8: memory that a watched run left behind and the next run may read
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._made_by_host: dict[int, Tensor] = {}  # by storage; keeps it alive, so that the key stays unique

    def begin(self) -> None:
        """Forget what earlier runs made: its addresses may be in use for other memory."""
        self._made.clear()
        self._made_by_host.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # On a GPU, also hold host memory that is uploaded: a graph reads it at each replay. Host memory that the run
        # itself made is refused: the captured run makes its own, and frees it.
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.device.type == "cpu" or result is NotImplemented:
            return result
        inputs = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        host = [tensor for tensor in inputs if self.is_host(tensor)]
        made = [local_tensor(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        on_device = any(not self.is_host(tensor) for tensor in made)
        if on_device and any(tensor.dim() and _key(tensor) in self._made_by_host for tensor in host):
            self.on_violation(Violation("copy to device", "it uploads host memory that the run itself created"))
        if on_device and inputs and len(host) == len(inputs):
            self.on_operator(func, args, kwargs or {}, host, made)
        if not on_device:
            before = {_key(tensor) for tensor in host} if func is not torch.ops.aten.lift_fresh.default else set()
            self._made_by_host.update({_key(tensor): tensor for tensor in made if _key(tensor) not in before})
        return result

    def on_operator(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], results: list[Any]
    ) -> None:
        """Record the memory that an operator reads and creates."""
        for tensor in inputs:
            address = tensor.untyped_storage().data_ptr()
            if address not in self._made and address not in self.held:
                self.held[address], self.read[address] = tensor.detach(), tensor
        for result in results:
            if isinstance(result, Tensor) and (address := result.untyped_storage().data_ptr()) not in self.held:
                self._made[address] = weakref.ref(result.untyped_storage())

    def hold_state(self) -> None:
        """Hold the memory that the last watched run made and the module keeps: the captured run may read it."""
        for address, made in self._made.items():
            if (storage := made()) is not None and address not in self.held:
                alias = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                self.held[address] = alias
                self.state.append(alias)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
