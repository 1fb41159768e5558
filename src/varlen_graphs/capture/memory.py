"""Memory that graphs read and do not own: found by watching, and held."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from varlen_graphs.errors import StaleGraphError


class ReadMemory(TorchDispatchMode):
    """Collects aliases of every tensor that operations take and that was not made under this mode.

    A graph keeps addresses, not tensors: whatever it reads must not be freed as long as it lives. That is the weights,
    and whatever else the module reaches: caches, plain attributes, closures.

    Attributes:
        tensors: One detached alias a storage. Holding them holds the memory.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[Tensor] = []
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and self._is_new(tensor):
                self.tensors.append(tensor.detach())
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._is_new(tensor)
        return result

    def _is_new(self, tensor: Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        if address in self._known:
            return False
        self._known.add(address)
        return True


class Weights:
    """The parameters and buffers of a module, held, and where they were at capture.

    Changing values in place is fine, because graphs read them at each replay. Moving or replacing them is not. What was
    there at capture is held, so nothing else can come to lie at its address.
    """

    def __init__(self, module: nn.Module) -> None:
        named = [
            (tensors, name, f"{prefix}.{name}" if prefix else name, tensor)
            for prefix, owner in module.named_modules()
            for tensors in (owner._parameters, owner._buffers)
            for name, tensor in tensors.items()
            if tensor is not None
        ]
        self._slots = [(tensors, name) for tensors, name, _, _ in named]
        self._paths = [path for _, _, path, _ in named]
        self._held = [tensor.detach() for _, _, _, tensor in named]
        self._addresses = [tensor.data_ptr() for tensor in self._held]

    def check(self) -> None:
        """Compare with the module as it is now: one address a tensor, on each call.

        Raises:
            StaleGraphError: A parameter or buffer is another tensor, or its memory is elsewhere.
        """
        try:
            if [tensors[name].data_ptr() for tensors, name in self._slots] == self._addresses:  # type: ignore[union-attr]
                return
        except (KeyError, AttributeError):
            pass  # removed, or set to None: named below
        for (tensors, name), path, address in zip(self._slots, self._paths, self._addresses, strict=True):
            tensor = tensors.get(name)
            if tensor is None or tensor.data_ptr() != address:
                raise StaleGraphError(
                    f"{path!r} was moved or replaced since the graphs were captured (module.to(...), "
                    "load_state_dict(assign=True), param.data = ...), and graphs read the memory it had; call "
                    "encoder.release(), and the next call captures anew. Changing weights in place needs nothing"
                )


def poison(tensor: Tensor) -> None:
    """Overwrite a tensor with what no computation survives: NaN, or a number far out of any range."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max // 2)
