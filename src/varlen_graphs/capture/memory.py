"""Memory that graphs read and do not own: found by watching, and held."""

import weakref
from collections.abc import Iterator
from itertools import cycle
from operator import is_
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn

from varlen_graphs.capture.watch import Watch
from varlen_graphs.errors import StaleGraphError

CALLS = 64
"""A change of a single weight is found within so many calls."""

SAMPLE = 8
"""At least so many parameters, buffers and submodules are looked at in each call."""


class ReadMemory(Watch):
    """Collects aliases of the tensors that the operations of watched runs take and that those runs did not make.

    A graph keeps addresses, not tensors: whatever it reads must not be freed as long as it lives. That is the weights,
    and whatever else the module reaches: caches, plain attributes, closures. What only a raw Triton launch takes is not
    seen; wrap the launch in an operator of torch.

    Attributes:
        held: One alias a storage, by its address. Holding them holds the memory.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        super().__init__(device, name)
        self.held: dict[int, Tensor | torch.UntypedStorage] = {}
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __enter__(self) -> Any:
        """Watch one run. What an earlier run made may be gone, and its addresses others'."""
        self._made.clear()
        return super().__enter__()

    def seen(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], results: list[Any]
    ) -> None:
        """Note what is read and what is made."""
        for tensor in inputs:
            address = tensor.untyped_storage().data_ptr()
            if address not in self._made:
                self.held.setdefault(address, tensor.detach())
        for result in results:
            if isinstance(result, Tensor) and (address := result.untyped_storage().data_ptr()) not in self.held:
                self._made[address] = weakref.ref(result.untyped_storage())

    def hold_state(self) -> None:
        """Hold what the last watched run made and the module keeps: its next run, the captured one, may read it."""
        for address, made in self._made.items():
            if (storage := made()) is not None:
                self.held.setdefault(address, storage)


class _Registrations:
    """Counts what is set on any module of the process: parameters, buffers and submodules."""

    def __init__(self) -> None:
        self.count = 0
        self._counting = False

    def begin(self) -> None:
        """Count from now on."""
        if not self._counting:
            self._counting = True
            torch_module.register_module_parameter_registration_hook(self._one_more)
            torch_module.register_module_buffer_registration_hook(self._one_more)
            torch_module.register_module_module_registration_hook(self._one_more)

    def _one_more(self, module: nn.Module, name: str, value: Any) -> None:
        self.count += 1


_REGISTRATIONS = _Registrations()


class Weights:
    """The parameters, buffers and submodules of a module, held, as they were at capture.

    Changing values in place is fine, because graphs read them at each replay. Moving or replacing them is not.
    """

    def __init__(self, module: nn.Module) -> None:
        owners = [
            (f"{prefix}." if prefix else "", owner)
            for prefix, owner in module.named_modules()
            if not isinstance(owner, torch.jit.ScriptModule)  # makes its submodules anew whenever it is asked
        ]
        places = [
            (prefix, values)
            for prefix, owner in owners
            for values in (owner._parameters, owner._buffers, owner._modules)
        ]
        slots = [
            _Slot(f"{prefix}{name}", values, name, value) for prefix, values in places for name, value in values.items()
        ]
        self._memory = [slot.value.detach() for slot in slots if isinstance(slot.value, Tensor)]  # nothing frees it
        self._sizes = [(prefix.rstrip("."), values, len(values)) for prefix, values in places]
        self._growing = [(owner._modules, len(owner._modules)) for _, owner in owners if _grows(owner)]
        slots.sort(key=lambda slot: not isinstance(slot.value, nn.Parameter))  # so that each sample gets some
        _REGISTRATIONS.begin()
        self._seen = _REGISTRATIONS.count
        count = min(CALLS, -(-len(slots) // SAMPLE))
        self._samples = [_Sample([*slots[:1], *slots[at::count]]) for at in range(count)]
        self._turns = cycle(self._samples)

    def check(self) -> None:
        """Compare all with the module as it is now: one identity a slot, and one address a tensor.

        Raises:
            StaleGraphError: A parameter, buffer or submodule is another object, is new, or its memory is elsewhere.
        """
        changed = next((path for sample in self._samples for path in sample.changed()), None)
        grown = next((path for path, values, size in self._sizes if len(values) != size), None)
        if changed is not None or grown is not None:
            what = (
                f"{changed!r} was moved or replaced"
                if changed is not None
                else f"{grown or 'the module'!r} got or lost a part"
            )
            raise StaleGraphError(
                f"{what} since the graphs were captured "
                "(module.to(...), load_state_dict(assign=True), param.data = ...), and graphs read the memory it had; "
                "call encoder.release(), and the next call captures anew. Changing weights in place needs nothing"
            )

    def check_some(self) -> None:
        """Compare a part of them, another part at each call, and all of them if one has changed, or may have.

        What changes all weights (moving, casting or loading the module) is found at once, and so is what is set on a
        module, as adapters are. New memory of a single weight (`param.data = ...`) is found within `CALLS` calls:
        comparing all of some hundred weights takes longer than the rest of a call. Modules with at most `SAMPLE` slots
        are always compared whole.

        Raises:
            StaleGraphError: As `check`.
        """
        if self._seen != _REGISTRATIONS.count:
            self._seen = _REGISTRATIONS.count
            self.check()
        sample = next(self._turns, None)
        if sample is not None and not sample.same():
            self.check()
        if any(len(values) != size for values, size in self._growing):
            self.check()


class _Slot(NamedTuple):
    """A place in a module that holds a parameter, a buffer or a submodule, and what it held at capture."""

    path: str
    owner: dict[str, Any]
    name: str
    value: Any


class _Sample:
    """Some slots of a module."""

    def __init__(self, slots: list[_Slot]) -> None:
        self._slots = slots
        self._owners = [slot.owner for slot in slots]
        self._names = [slot.name for slot in slots]
        self._values = [slot.value for slot in slots]
        self._tensors = [value for value in self._values if isinstance(value, Tensor)]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]

    def same(self) -> bool:
        """Whether all slots are as they were."""
        now = map(dict.get, self._owners, self._names)
        return all(map(is_, now, self._values)) and list(map(Tensor.data_ptr, self._tensors)) == self._addresses

    def changed(self) -> Iterator[str]:
        """The paths of those that are not."""
        addresses = dict(zip(map(id, self._tensors), self._addresses, strict=True))
        for path, owner, name, value in self._slots:
            if owner.get(name) is not value or (isinstance(value, Tensor) and value.data_ptr() != addresses[id(value)]):
                yield path


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


def _grows(module: nn.Module) -> bool:
    """Whether submodules are added to a module while it is in use, as adapters are."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def poison(tensor: Tensor) -> None:
    """Overwrite a tensor with what no computation survives: NaN, or a number far out of any range (True for bool)."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max // 2)
