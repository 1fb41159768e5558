"""Host tensors that a forward makes and copies to the device: constants of a graph."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from varlen_graphs.torch_dispatch.rules import Violation
from varlen_graphs.torch_dispatch.rules_mode import CaptureRulesMode
from varlen_graphs.torch_dispatch.thread_modes import unwatched


class HostConstant(NamedTuple):
    """Copies of a host tensor as it was when a run copied it to the device. Graphs read the second one."""

    on_host: Tensor
    on_device: Tensor

    def equals(self, tensor: Tensor) -> bool:
        """Return True if a host tensor has the same dtype, shape and bits."""
        mine = self.on_host
        if (mine.dtype, mine.shape) != (tensor.dtype, tensor.shape):
            return False
        with unwatched():
            return torch.equal(_bits(mine), _bits(tensor))


class ConstantsMode(CaptureRulesMode):
    """Dispatch mode that gives a run the constants of the run before it, one after the other.

    It refuses a host tensor that differs from that of the run before.
    """

    def __init__(self, device: torch.device, name: str, constants: Sequence[HostConstant]) -> None:
        super().__init__(device, name)
        self.takes_constants = bool(constants)
        self._constants = constants
        self._next: Iterator[HostConstant] = iter(())

    def begin(self) -> None:
        """Start with the first constant."""
        super().begin()
        self._next = iter(self._constants)

    def make_constant(self, host: Tensor) -> Tensor:
        """Return the constant of the run before."""
        constant = next(self._next, None)
        if constant is not None and constant.equals(host):
            return constant.on_device
        what = f"it copies a host tensor {list(host.shape)} to the device that differs from that of the run before"
        self.on_violation(Violation("copy to device", what))
        return super().make_constant(host)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
