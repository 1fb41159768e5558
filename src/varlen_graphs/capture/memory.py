"""Memory of graphs: how it is left to the pool, poisoned, and freed after errors."""

import traceback
import weakref
from types import SimpleNamespace

import torch
from torch import Tensor


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
