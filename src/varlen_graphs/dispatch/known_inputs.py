"""What a captured run reads and writes, where no run of its size came before."""

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from varlen_graphs.dispatch.leaves import tensors_in
from varlen_graphs.dispatch.rules import written_arguments
from varlen_graphs.dispatch.thread_modes import Result, RunMode, run_under


class OtherRunError(Exception):
    """A run does what the watched runs of other sizes did not."""


class KnownInputs(RunMode):
    """Dispatch mode that refuses a run which reads what watched runs did not read, or uses the host.

    A graph keeps addresses, so what it reads is to be held. `CapturedInputs` sees to that, and takes several times as
    long as this.

    Args:
        device: The device of the graph.
        known: Addresses of the storages that watched runs have read.
        shared: Those of them that no run may write to.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device, known: Collection[int], shared: Collection[int]) -> None:
        super().__init__()
        self._device = device
        self._known = frozenset({*known, 0})  # nothing is read of an empty tensor
        self._shared = frozenset(shared)
        self._made: set[int] = set()
        self._results: list[weakref.ref[Tensor]] = []  # in memory that the run made, views included

    def watch(self, run: Callable[[], Result]) -> Result:
        """Call a function in this thread, without gradients.

        Raises:
            OtherRunError: It does what watched runs did not do.
        """
        self._made.clear()
        self._results.clear()
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
                if tensor.untyped_storage().data_ptr() in self._shared:
                    raise OtherRunError(f"{func} writes to {list(tensor.shape)}")
        result = func(*args, **kwargs)
        for made in [result] if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(made, Tensor):
                address = made.untyped_storage().data_ptr()
                if made.device != self._device:
                    raise OtherRunError(f"{func} makes {list(made.shape)} on {made.device}")
                if address not in self._known:
                    self._made.add(address)
                    self._results.append(weakref.ref(made))
        return result

    def keeps_more_than(self, outputs: Iterable[Tensor]) -> bool:
        """Return True if somebody keeps a tensor that the run made, other than its outputs: a cache, for example."""
        own = {tensor.untyped_storage().data_ptr() for tensor in outputs}
        made = (result() for result in self._results)
        return any(one is not None and one.untyped_storage().data_ptr() not in own for one in made)
