"""Memory that graphs read and do not own: found by watching, and held."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from varlen_graphs.watch.rules import Offence
from varlen_graphs.watch.sharded import local
from varlen_graphs.watch.watch import Watch


class ReadMemory(Watch):
    """Collects aliases of the tensors that the operations of watched runs take and that those runs did not make.

    A graph keeps addresses, not tensors: whatever it reads must not be freed as long as it lives. That is the weights,
    and whatever else the module reaches: caches, plain attributes, closures. What only a raw Triton launch takes is not
    seen; wrap the launch in an operator of torch.

    Attributes:
        held: One alias a storage, by its address. Holding them holds the memory, unless somebody resizes the storage.
        read: The tensors themselves, by the same address: what happens to one of them is seen by looking at it.
        state: What a watched run left behind, as uint8; the next one may read it.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        super().__init__(device, name)
        self.held: dict[int, Tensor] = {}
        self.read: dict[int, Tensor] = {}
        self.state: list[Tensor] = []
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._made_by_host: dict[int, Tensor] = {}  # by storage, kept alive, so that the key stays unique

    def __enter__(self) -> Any:
        """Watch one run. What an earlier run made may be gone, and its addresses others'."""
        self._made.clear()
        self._made_by_host.clear()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Stop watching."""
        super().__exit__(*error)
        self._made_by_host.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Hold host memory that is uploaded, on a GPU: a graph reads it at each replay.

        Memory that the run itself made is refused: the run that is captured makes its own, and frees it.
        """
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._device.type == "cpu" or result is NotImplemented:
            return result
        inputs = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        host = [tensor for tensor in inputs if self.is_host(tensor)]
        made = [local(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        on_device = any(not self.is_host(tensor) for tensor in made)
        if on_device and any(tensor.dim() and _key(tensor) in self._made_by_host for tensor in host):
            self.refuse(Offence("copy to device", "it copies to the device what the run itself has put on the host"))
        if on_device and inputs and len(host) == len(inputs):
            self.seen(func, args, kwargs or {}, host, made)
        if not on_device:
            before = {_key(tensor) for tensor in host} if func is not torch.ops.aten.lift_fresh.default else set()
            self._made_by_host.update({_key(tensor): tensor for tensor in made if _key(tensor) not in before})
        return result

    def seen(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], results: list[Any]
    ) -> None:
        """Note what is read and what is made."""
        for tensor in inputs:
            address = tensor.untyped_storage().data_ptr()
            if address not in self._made and address not in self.held:
                self.held[address], self.read[address] = tensor.detach(), tensor
        for result in results:
            if isinstance(result, Tensor) and (address := result.untyped_storage().data_ptr()) not in self.held:
                self._made[address] = weakref.ref(result.untyped_storage())

    def hold_state(self) -> None:
        """Hold what the last watched run made and the module keeps: its next run, the captured one, may read it."""
        for address, made in self._made.items():
            if (storage := made()) is not None and address not in self.held:
                alias = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                self.held[address] = alias
                self.state.append(alias)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
