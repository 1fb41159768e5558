"""Memory that a run allocates, counted at its operators."""

import weakref
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.torch_dispatch.leaves import leaves_of, tensors_in
from varlen_graphs.torch_dispatch.rules import has_storage
from varlen_graphs.torch_dispatch.thread_modes import RunMode


class MemoryMeter(RunMode):
    """Dispatch mode for `run_under` that counts the memory which operators allocate on a device.

    What an operator takes inside and gives back is not seen.

    Attributes:
        total: Bytes of everything that was allocated.
        most: Bytes that were in use at a time, at most.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.total = 0
        self.most = 0
        self._device = device
        self._now = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def run_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and return its result."""
        result = func(*args, **kwargs)
        own = [one for one in leaves_of(result) if isinstance(one, Tensor) and has_storage(one)]
        if own:
            before = {one.untyped_storage()._cdata for one in tensors_in(args, kwargs) if has_storage(one)}
            for one in own:
                if one.device.type == self._device.type and one.untyped_storage()._cdata not in before:
                    self._add(one.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if (known := self._alive.get(key)) is not None and known() is not None:
            return

        def free(_: object) -> None:
            self._now -= size

        self._alive[key] = weakref.ref(storage, free)
        self.total += size
        self._now += size
        self.most = max(self.most, self._now)
