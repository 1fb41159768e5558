"""A dispatch mode for captures of sizes that have not run before."""

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.torch_dispatch.leaves import leaves_of, tensors_in
from varlen_graphs.torch_dispatch.rules import written_arguments
from varlen_graphs.torch_dispatch.thread_modes import Result, RunMode, run_under


class OtherRunError(Exception):
    """A run does what the watched runs of other sizes did not."""


class KnownInputs(RunMode):
    """Dispatch mode that refuses a run which reads what watched runs did not read, writes to it, or uses the host.

    A graph keeps addresses, so what it reads is to be held. `CapturedInputs` sees to that, and takes several times as
    long as this.

    Args:
        device: The device of the graph.
        known: Addresses of the storages that watched runs have read.
        static: Addresses of those that graphs are made to read and write.
    """

    def __init__(self, device: torch.device, known: Collection[int], static: Collection[int]) -> None:
        super().__init__()
        self._device = device
        self._writable = {*static, 0}  # nothing is written to an empty tensor
        self._known = {*known, *self._writable}
        self._made: set[int] = set()
        self._results: list[weakref.ref[Any]] = []  # of made memory: storages, but on the tape, which has them all

    def watch(self, run: Callable[[], Result]) -> Result:
        """Call a function in this thread, without gradients; again, if a capture is tried again.

        Raises:
            OtherRunError: It does what watched runs did not do.
        """
        self._made.clear()
        result = run_under(run, self)
        if self.met_compiled:
            raise OtherRunError("it calls code under torch.compile")
        return result

    def run_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and return its result."""
        for tensor in tensors_in(args, kwargs):
            address = tensor.untyped_storage().data_ptr()
            if tensor.device != self._device or (address not in self._made and address not in self._known):
                raise OtherRunError(f"{func} reads {list(tensor.shape)} on {tensor.device}")
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            for tensor in written_arguments(func, args, kwargs):
                address = tensor.untyped_storage().data_ptr()
                if address not in self._made and address not in self._writable:
                    raise OtherRunError(f"{func} writes to {list(tensor.shape)}")
        result = func(*args, **kwargs)
        for made in leaves_of(result):
            if isinstance(made, Tensor):
                storage = made.untyped_storage()
                if made.device != self._device:
                    raise OtherRunError(f"{func} makes {list(made.shape)} on {made.device}")
                if storage.data_ptr() not in self._known:
                    self._made.add(storage.data_ptr())
                    self._results.append(weakref.ref(storage if made.is_cuda else made))
        return result

    def kept(self, outputs: Iterable[Tensor] = ()) -> dict[int, torch.UntypedStorage]:
        """Return what the run made and somebody keeps, a cache for example, beside these very tensors, by address.

        Captures of CUDA compute nothing: it holds what was there before, until the graph replays.
        """
        own = {*map(id, outputs)}
        alive = [one for reference in self._results if (one := reference()) is not None and id(one) not in own]
        storages = [one.untyped_storage() if isinstance(one, Tensor) else one for one in alive]
        return {storage.data_ptr(): storage for storage in storages}
