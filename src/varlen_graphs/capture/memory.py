"""Memory that graphs read and do not own: found by watching, and held."""

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
        held: One detached alias a storage, by its address. Holding them holds the memory.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        super().__init__(device, name)
        self.held: dict[int, Tensor] = {}
        self._made: set[int] = set()

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
                self._made.add(address)


class Weights:
    """The parameters, buffers and submodules of a module, held, as they were at capture.

    Changing values in place is fine, because graphs read them at each replay. Moving or replacing them is not.
    """

    def __init__(self, module: nn.Module) -> None:
        tensors = [
            (slots, name, f"{prefix}.{name}" if prefix else name)
            for prefix, owner in module.named_modules()
            for slots in (owner._parameters, owner._buffers)
            for name, tensor in slots.items()
            if tensor is not None
        ]
        children = [
            (owner._modules, name, f"{prefix}.{name}" if prefix else name)
            for prefix, owner in module.named_modules()
            for name, child in owner._modules.items()
            if child is not None
        ]
        slots: list[tuple[dict[str, Any], str, str]] = [*tensors, *children]
        self._paths = [path for _, _, path in slots]
        self._slots = [(owner, name) for owner, name, _ in slots]
        self._values = [owner[name] for owner, name in self._slots]
        self._tensors: list[Tensor] = self._values[: len(tensors)]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._memory = [tensor.detach() for tensor in self._tensors]  # param.data = ... must not free it

    def check(self) -> None:
        """Compare with the module as it is now: one identity a slot, and one address a tensor.

        Raises:
            StaleGraphError: A parameter, buffer or submodule is another object, or its memory is elsewhere.
        """
        now = [owner.get(name) for owner, name in self._slots]
        if not all(map(is_, now, self._values)) or [t.data_ptr() for t in self._tensors] != self._addresses:
            raise StaleGraphError(
                f"{next(self._changed(now))!r} was moved or replaced since the graphs were captured (module.to(...), "
                "load_state_dict(assign=True), param.data = ...), and graphs read the memory it had; call "
                "encoder.release(), and the next call captures anew. Changing weights in place needs nothing"
            )

    def _changed(self, now: list[Any]) -> Iterator[str]:
        for at, (path, value) in enumerate(zip(self._paths, self._values, strict=True)):
            if now[at] is not value or (at < len(self._tensors) and value.data_ptr() != self._addresses[at]):
                yield path


def poison(tensor: Tensor) -> None:
    """Overwrite a tensor with what no computation survives: NaN, or a number far out of any range (True for bool)."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max // 2)
