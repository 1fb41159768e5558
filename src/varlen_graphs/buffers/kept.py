"""Constants that the host computes once."""

from collections.abc import Callable

import torch
from torch import Tensor


class Kept:
    """A tensor that is made on the CPU when it is first asked for, and kept on each device where it was.

    That is before anything is captured: what graphs run is run without them first.

    Args:
        make: Gives the tensor, on the CPU.
    """

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make
        self._on: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """The tensor on a device. The first time it is copied there, which may sync."""
        if device not in self._on:
            with torch.inference_mode(False):
                self._on[device] = self._make().to(device)
        return self._on[device]
