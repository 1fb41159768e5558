"""Memory of graphs: released to the pool, poisoned, and freed after errors."""

import math
import traceback
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor


def release_to_pool(outputs: list[Tensor]) -> list[Tensor]:
    """Return aliases of the outputs of a capture that let later captures in the pool reuse their memory.

    Replays of one pool take turns, and their outputs are read before the next one, so graphs may share the memory of
    outputs like any other. Outputs that were not allocated in the capture (a weight, rows of the arena, tensors that
    the module keeps) are held as usual.

    Args:
        outputs: Tensors on the GPU. The list is emptied; no other reference to them may be left.
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


def move_from_pool(storages: Iterable[torch.UntypedStorage]) -> None:
    """Give storages that were allocated in a capture other memory, with the same bytes, for all their tensors."""
    for storage in storages:
        held = storage.clone()
        storage.resize_(0)
        storage.resize_(held.nbytes())
        storage.copy_(held)


def device_bytes(address: int, size: int) -> Tensor:
    """Return memory of the current GPU as uint8 `[size]`, without keeping it alive."""
    interface = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device="cuda")


def poison(tensor: Tensor) -> None:
    """Overwrite a tensor with NaN, or with a number far out of any valid range (True for bool)."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max // 2)


def forget_frames(error: BaseException) -> None:
    """Clear the local variables in the traceback of an error, which would keep tensors alive."""
    following: BaseException | None = error
    while following is not None:
        traceback.clear_frames(following.__traceback__)
        following = following.__context__


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error says that a GPU or the host is out of memory."""
    # Torch raises its own class for some of these only.
    short = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in short)


def empty_cache(device: torch.device) -> None:
    """Return memory that torch's allocator keeps unused to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def available_bytes(device: torch.device) -> float:
    """Return the memory that this process may still allocate on a device; infinity if nothing tells."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        allowed = torch.cuda.get_per_process_memory_fraction(device) * total
        return min(free + reserved, allowed) - allocated
    return min(_host_limits(), default=math.inf)


def _host_limits() -> Iterator[int]:
    """Yield what the machine, the container and the limits of the process leave of the host's memory."""
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        yield next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    with suppress(OSError, ValueError):
        folder = Path("/sys/fs/cgroup")
        most, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        yield most - used + int(cached["file"])
    with suppress(ImportError, OSError, ValueError):
        import resource

        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        if most != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            yield most - pages * resource.getpagesize()
