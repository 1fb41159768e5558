"""Discovery of the memory that graphs read and do not own, and references that keep it alive."""

import weakref
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.errors import CaptureError
from varlen_graphs.torch_dispatch.host_constants import HostConstant
from varlen_graphs.torch_dispatch.rules_mode import CaptureRulesMode
from varlen_graphs.torch_dispatch.thread_modes import unwatched


class CapturedInputs(CaptureRulesMode):
    """Dispatch mode that collects the tensors that operations read and that the run itself did not create.

    A graph keeps addresses, not tensors, so everything it reads must outlive it: weights, and whatever else the module
    reaches through caches, plain attributes and closures. Tensors that only a raw Triton launch reads are not seen.
    """

    def __init__(self, device: torch.device, name: str, takes_constants: bool = True) -> None:
        super().__init__(device, name)
        self.takes_constants = takes_constants
        self.held: dict[int, Tensor] = {}  # an alias per storage, by address: keeps it alive unless it is resized
        self.read: dict[int, Tensor] = {}  # the tensors themselves, to detect later changes to them
        self.state: list[Tensor] = []  # uint8: memory that a watched run left behind and the next run may read
        self.constants: list[HostConstant] = []  # of the last watched run, in order
        self._made_by_operators: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._results: list[weakref.ref[Tensor]] = []  # in memory that operators made, views included

    def begin(self) -> None:
        """Forget what earlier runs made: its addresses may be in use for other memory."""
        super().begin()
        self._made_by_operators.clear()
        self._results.clear()
        if not self.on_fast_path:
            self.constants = []

    def make_constant(self, host: Tensor) -> Tensor:
        """Make a constant, and hold it."""
        on_device = super().make_constant(host)
        with unwatched():
            self.constants.append(HostConstant(host.detach().clone(), on_device))
        self.held[on_device.untyped_storage().data_ptr()] = on_device
        return on_device

    def on_operator(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], results: list[Any]
    ) -> None:
        """Record the memory that an operator reads and creates."""
        for tensor in inputs:
            address = _address(tensor)
            if tensor not in self._made and address not in self._made_by_operators and address not in self.held:
                self.held[address], self.read[address] = tensor.detach(), tensor
        for result in results:
            if isinstance(result, Tensor) and (address := _address(result)) not in self.held:
                self._made_by_operators[address] = weakref.ref(result.untyped_storage())
                self._results.append(weakref.ref(result))

    def alive(self) -> list[Tensor]:
        """Return tensors, views included, that the last watched run made and that somebody keeps."""
        return [result for reference in self._results if (result := reference()) is not None]

    def hold_state(self) -> None:
        """Hold the memory that the last watched run made and the module keeps: the captured run may read it."""
        for address, made in self._made_by_operators.items():
            if (storage := made()) is not None and address not in self.held:
                alias = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                self.held[address] = alias
                self.state.append(alias)


def _address(tensor: Tensor) -> int:
    """Return the address of the memory of a tensor.

    Raises:
        CaptureError: It has none of its own, as the tensors inside of `torch.func.jvp`.
    """
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError as error:
        raise CaptureError(
            "the module computes derivatives in forward mode (torch.func.jvp or torch.autograd.forward_ad), in which "
            "the memory that a graph would read cannot be seen: compute them in reverse mode (torch.func.vjp), or run "
            "the module without graphs (backend='eager')"
        ) from error
