"""The base of classes whose objects shadows share, and constants that the host computes once."""

from collections.abc import Callable

import torch
from torch import Tensor

from varlen_graphs.torch_dispatch.thread_modes import unwatched


class NotCopied:
    """Base of classes whose objects shadows share: no run of a module changes them."""


class DeviceConstants(NotCopied):
    """Tensor that `make` computes on the CPU at its first use, with one cached copy per device.

    It depends on nothing that a run changes: shadows share it, and to compute it is no part of the run that needs it
    first. The first use precedes every capture, because each forward runs eagerly before it is captured.
    """

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make
        self._on: dict[torch.device, Tensor] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """The copies there are."""
        return [*self._on.values()]

    def on(self, device: torch.device) -> Tensor:
        """Return the copy on a device. The first call for a device copies the tensor there, which may sync."""
        if device not in self._on:
            with unwatched(), torch.inference_mode(False):
                self._on[device] = self._make().to(device)
        return self._on[device]
