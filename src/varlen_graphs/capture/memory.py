"""Memory that graphs read and do not own: found by watching, and held."""

import traceback
import weakref
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from varlen_graphs.capture.rules import Offence
from varlen_graphs.capture.watch import Watch
from varlen_graphs.sharded import local


class ReadMemory(Watch):
    """Collects aliases of the tensors that the operations of watched runs take and that those runs did not make.

    A graph keeps addresses, not tensors: whatever it reads must not be freed as long as it lives. That is the weights,
    and whatever else the module reaches: caches, plain attributes, closures. What only a raw Triton launch takes is not
    seen; wrap the launch in an operator of torch.

    Attributes:
        held: One alias a storage, by its address. Holding them holds the memory, unless somebody resizes the storage.
        read: The tensors themselves, by the same address: what happens to one of them is seen by looking at it.
        state: What a watched run left behind, as uint8; the next one may read it.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        super().__init__(device, name)
        self.held: dict[int, Tensor] = {}
        self.read: dict[int, Tensor] = {}
        self.state: list[Tensor] = []
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._made_by_host: dict[int, Tensor] = {}  # by storage, kept alive, so that the key stays unique

    def __enter__(self) -> Any:
        """Watch one run. What an earlier run made may be gone, and its addresses others'."""
        self._made.clear()
        self._made_by_host.clear()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Stop watching."""
        super().__exit__(*error)
        self._made_by_host.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Hold host memory that is uploaded, on a GPU: a graph reads it at each replay.

        Memory that the run itself made is refused: the run that is captured makes its own, and frees it.
        """
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._device.type == "cpu" or result is NotImplemented:
            return result
        inputs = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        host = [tensor for tensor in inputs if self.is_host(tensor)]
        made = [local(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        on_device = any(not self.is_host(tensor) for tensor in made)
        if on_device and any(tensor.dim() and _key(tensor) in self._made_by_host for tensor in host):
            self.refuse(Offence("copy to device", "it copies to the device what the run itself has put on the host"))
        if on_device and inputs and len(host) == len(inputs):
            self.seen(func, args, kwargs or {}, host, made)
        if not on_device:
            before = {_key(tensor) for tensor in host} if func is not torch.ops.aten.lift_fresh.default else set()
            self._made_by_host.update({_key(tensor): tensor for tensor in made if _key(tensor) not in before})
        return result

    def seen(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], results: list[Any]
    ) -> None:
        """Note what is read and what is made."""
        for tensor in inputs:
            address = tensor.untyped_storage().data_ptr()
            if address not in self._made and address not in self.held:
                self.held[address], self.read[address] = tensor.detach(), tensor
        for result in results:
            if isinstance(result, Tensor) and (address := result.untyped_storage().data_ptr()) not in self.held:
                self._made[address] = weakref.ref(result.untyped_storage())

    def hold_state(self) -> None:
        """Hold what the last watched run made and the module keeps: its next run, the captured one, may read it."""
        for address, made in self._made.items():
            if (storage := made()) is not None and address not in self.held:
                alias = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                self.held[address] = alias
                self.state.append(alias)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def left_to_pool(outputs: list[Tensor]) -> list[Tensor]:
    """Aliases of what a capture returned that do not keep its memory from later captures in the pool.

    Replays of one pool take turns, and their outputs are read before the next one, so graphs may share the memory of
    their outputs like any other. What was not allocated in the capture (a weight, the arena's rows, what the module
    keeps) is held as usual.

    Args:
        outputs: On the GPU. Emptied: no other reference to them may be left.
    """
    forms = [(t.device, t.dtype, t.shape, t.stride(), t.storage_offset()) for t in outputs]
    storages = [tensor.untyped_storage() for tensor in outputs]
    places = [(storage.data_ptr(), storage.nbytes(), weakref.ref(storage)) for storage in storages]
    outputs.clear()
    storages.clear()
    aliases = []
    for (device, dtype, shape, stride, offset), (address, size, reference) in zip(forms, places, strict=True):
        if (storage := reference()) is not None:
            alias = torch.empty(0, dtype=dtype, device=device).set_(storage, offset, shape, stride)
        elif size == 0:
            alias = torch.empty(shape, dtype=dtype, device=device)
        else:
            whole = device_bytes(address, size // dtype.itemsize * dtype.itemsize)
            alias = whole.view(dtype).as_strided(shape, stride, offset)
        aliases.append(alias)
    return aliases


def device_bytes(address: int, size: int) -> Tensor:
    """Memory of the current GPU as uint8 `[size]`, which it does not hold."""
    interface = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device="cuda")


def poison(tensor: Tensor) -> None:
    """Overwrite a tensor with what no computation survives: NaN, or a number far out of any range (True for bool)."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max // 2)


def forget_frames(error: BaseException) -> None:
    """Drop the local variables of the functions that an error came through, whose tensors it would keep."""
    following: BaseException | None = error
    while following is not None:
        traceback.clear_frames(following.__traceback__)
        following = following.__context__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory is short, of a GPU or of the host."""
    short = ("out of memory", "not enough memory")  # torch has a class for the first of several places only
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in short)
