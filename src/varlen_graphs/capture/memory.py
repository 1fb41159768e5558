"""Memory that graphs read and do not own: found by watching, and held."""

import weakref
from collections.abc import Iterator
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from varlen_graphs.capture.watch import Watch
from varlen_graphs.errors import StaleGraphError


class ReadMemory(Watch):
    """Collects aliases of the tensors that the operations of watched runs take and that those runs did not make.

    A graph keeps addresses, not tensors: whatever it reads must not be freed as long as it lives. That is the weights,
    and whatever else the module reaches: caches, plain attributes, closures. What only a raw Triton launch takes is not
    seen; wrap the launch in a custom operator.

    Attributes:
        held: One alias a storage, by its address. Holding them holds the memory.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        super().__init__(device, name)
        self.held: dict[int, Tensor | torch.UntypedStorage] = {}
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __enter__(self) -> Any:
        """Watch one run. What an earlier run made may be gone, and its addresses others'."""
        self._made.clear()
        return super().__enter__()

    def seen(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], results: list[Any]
    ) -> None:
        """Note what is read and what is made."""
        for tensor in inputs:
            address = tensor.untyped_storage().data_ptr()
            if address not in self._made:
                self.held.setdefault(address, tensor.detach())
        for result in results:
            if isinstance(result, Tensor) and (address := result.untyped_storage().data_ptr()) not in self.held:
                self._made[address] = weakref.ref(result.untyped_storage())

    def hold_state(self) -> None:
        """Hold what the last watched run made and the module keeps: its next run, the captured one, may read it."""
        for address, made in self._made.items():
            if (storage := made()) is not None:
                self.held.setdefault(address, storage)


class Weights:
    """The parameters, buffers and submodules of a module, held, as they were at capture.

    Changing values in place is fine, because graphs read them at each replay. Moving or replacing them is not.
    """

    def __init__(self, module: nn.Module) -> None:
        owners = [
            (f"{prefix}." if prefix else "", owner)
            for prefix, owner in module.named_modules()
            if not isinstance(owner, torch.jit.ScriptModule)  # makes its submodules anew whenever it is asked
        ]
        slots: list[tuple[str, dict[str, Any], str]] = [
            (f"{prefix}{name}", values, name)
            for prefix, owner in owners
            for values in (owner._parameters, owner._buffers, owner._modules)
            for name in values
        ]
        self._paths = [path for path, _, _ in slots]
        self._slots = [(values, name) for _, values, name in slots]
        self._values = [values[name] for values, name in self._slots]
        self._tensors = [value for value in self._values if isinstance(value, Tensor)]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._memory = [tensor.detach() for tensor in self._tensors]  # param.data = ... must not free it
        self._containers = [
            (prefix.rstrip("."), owner, len(owner._modules)) for prefix, owner in owners if _grows(owner)
        ]

    def check(self) -> None:
        """Compare with the module as it is now: one identity a slot, and one address a tensor.

        Raises:
            StaleGraphError: A parameter, buffer or submodule is another object, or its memory is elsewhere.
        """
        try:
            now = [values[name] for values, name in self._slots]
        except KeyError:  # one was removed
            now = [values.get(name) for values, name in self._slots]
        same = all(map(is_, now, self._values)) and list(map(Tensor.data_ptr, self._tensors)) == self._addresses
        if not same or any(len(owner._modules) != size for _, owner, size in self._containers):
            raise StaleGraphError(
                f"{next(self._changed(now), 'a submodule')!r} was moved or replaced since the graphs were captured "
                "(module.to(...), load_state_dict(assign=True), param.data = ...), and graphs read the memory it had; "
                "call encoder.release(), and the next call captures anew. Changing weights in place needs nothing"
            )

    def _changed(self, now: list[Any]) -> Iterator[str]:
        addresses = dict(zip(map(id, self._tensors), self._addresses, strict=True))
        for path, value, current in zip(self._paths, self._values, now, strict=True):
            if current is not value or (isinstance(value, Tensor) and value.data_ptr() != addresses[id(value)]):
                yield path
        yield from (path for path, owner, size in self._containers if len(owner._modules) != size)


def _grows(module: nn.Module) -> bool:
    """Whether submodules are added to a module while it is in use, as adapters are."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def poison(tensor: Tensor) -> None:
    """Overwrite a tensor with what no computation survives: NaN, or a number far out of any range (True for bool)."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max // 2)
