"""Host tensors that a run makes, and those of them that may be constants of a graph."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varlen_graphs.torch_dispatch.rules import draws_random_numbers, has_storage, written_arguments
from varlen_graphs.torch_dispatch.sharded import local_tensor
from varlen_graphs.torch_dispatch.thread_modes import unwatched


class _Copy(NamedTuple):
    """Copy of a constant on the device, its version when it was made, and a copy on the host."""

    on_device: Tensor
    version: int
    on_host: Tensor


class HostTensors:
    """Host tensors made in one run.

    Those made of sizes, Python numbers and one another are constants: they are the same whenever Python does the same.
    Others are not: random numbers, and what is computed from host tensors that existed before the run, or made after
    the run has read values of such tensors.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, bool]] = {}  # by storage; held, so that the keys stay unique
        self._copies: dict[int, _Copy] = {}  # by storage of the device
        self._reads_others = False

    def clear(self) -> None:
        """Begin another run."""
        self._made.clear()
        self._copies.clear()
        self._reads_others = False

    def __contains__(self, tensor: Tensor) -> bool:
        return _key(tensor) in self._made

    def are_constants(self, tensors: Iterable[Tensor]) -> bool:
        """Return True if all tensors are constants, as Python numbers are."""
        return not self._reads_others and all(self._made.get(_key(one), (one, False))[1] for one in tensors)

    def add(self, made: Tensor, tensors: Sequence[Tensor]) -> None:
        """Add a tensor that a torch function made, and that is not known as random numbers.

        `tensors` are the arguments of the function.
        """
        if key := _key(made):
            self._made.setdefault(key, (made.detach(), self.are_constants(tensors)))

    def add_results(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], results: list[Tensor]
    ) -> None:
        """Add what an operator on the host makes of its inputs, or writes into them."""
        if not isinstance(func, torch._ops.OpOverload):
            return
        if func is torch.ops.aten.lift_fresh.default:  # made of a list or an array
            self.add(results[0], ())
            return
        draws = draws_random_numbers(func, args, kwargs)
        if not inputs and not draws:
            return  # added by the torch function that calls it
        before = {_key(tensor) for tensor in inputs} - self._made.keys()
        constant = not draws and self.are_constants(inputs)
        for tensor in (*results, *written_arguments(func, args, kwargs)):
            key = _key(tensor)
            if key and key not in before:
                self._made[key] = tensor.detach(), constant

    def add_copy(self, on_host: Tensor, on_device: Tensor) -> None:
        """Add the copy on the device of a constant."""
        with unwatched():
            self._copies[_key(on_device)] = _Copy(on_device, on_device._version, on_host.detach().clone())

    def copy_on_host(self, tensor: Tensor) -> Tensor | None:
        """Return a device tensor as it is on the host: a constant, or a view of one, that nothing has written to.

        `None` if it is another tensor.
        """
        copy = self._copies.get(_key(tensor))
        if copy is None:
            return None
        with unwatched():
            if copy.on_device._version != copy.version:
                return None
            same = tensor.dtype == copy.on_host.dtype and copy.on_device.stride() == copy.on_host.stride()
            return copy.on_host.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()) if same else None

    def read(self, tensor: Tensor) -> None:
        """Note that Python reads the values of a host tensor."""
        self._reads_others = self._reads_others or not self.are_constants([tensor])


def _key(tensor: Tensor) -> int:
    """Return what is unique to the storage of a tensor; 0 if it has no storage of its own."""
    if not has_storage(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return 0
    return int(local_tensor(tensor).untyped_storage()._cdata)
