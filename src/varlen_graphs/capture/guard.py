"""Whether the memory that graphs read is still where, and what, it was when they were captured."""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from itertools import cycle
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn

from varlen_graphs.capture.owners import describe, tensors_of
from varlen_graphs.sharded import is_wrapper, local

CALLS = 64
"""A change of a single tensor is found within so many calls."""

SAMPLE = 8
"""At least so many tensors and submodules are looked at in each call."""


class _Events:
    """Counts what may void graphs: what is set on any module of the process, and storages resized in place.

    Torch has hooks for parameters, buffers and submodules, and none for `UntypedStorage.resize_`, by which sharding
    frees the memory of weights: a function that counts is put around it.
    """

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
            torch.UntypedStorage.resize_ = self._counted(torch.UntypedStorage.resize_)  # type: ignore[method-assign]

    def _one_more(self, *event: Any) -> None:
        self.count += 1

    def _counted(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(resize)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return resize(*args, **kwargs)

        return counted


_EVENTS = _Events()


class Guard:
    """The parameters, buffers and submodules of a module, and what else its graphs read, held as they are now.

    Changing values in place is fine, because graphs read them at each replay. Other memory is not, nor memory that is
    read as another dtype or shape; nor is a storage that was resized in place, as sharding and offloading do, which
    frees what graphs read however it is held.

    A plain attribute that is set to another tensor is none of these: modules do that with their caches. Graphs go on
    reading the tensor that it was.

    Args:
        module: The module.
        read: What graphs read, parameters and buffers or not, as `ReadMemory.read` has it.
    """

    def __init__(self, module: nn.Module, read: Iterable[Tensor]) -> None:
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
        known = {id(part) for slot in slots for part in _parts_of(slot.value)}
        outside = _slots_outside([tensor for tensor in read if id(tensor) not in known], module)
        slots += outside
        tensors = [slot.value for slot in slots if isinstance(slot.value, Tensor)]
        self._memory = [local(tensor).detach() for tensor in tensors]  # nothing frees it
        self._sizes = [(prefix.rstrip("."), values, len(values)) for prefix, values in places]
        self._growing = [(owner._modules, len(owner._modules)) for _, owner in owners if _grows(owner)]
        slots.sort(key=lambda slot: not isinstance(slot.value, nn.Parameter))  # so that each sample gets some
        _EVENTS.begin()
        self._seen = _EVENTS.count
        count = min(CALLS, -(-len(slots) // SAMPLE))
        always = [*outside[:SAMPLE], *slots[:1]]  # memory outside is the likeliest to go
        self._all = _Sample(slots)
        self._turns = cycle([_Sample([*always, *slots[at::count]]) for at in range(count)])

    def change(self) -> str | None:
        """What is not as it was, of all there is."""
        seen, found = _EVENTS.count, next(self._all.changes(), None)
        if found is None:
            grown = next((path for path, values, size in self._sizes if len(values) != size), None)
            found = None if grown is None else f"{grown or 'the module'!r} got or lost a part"
        self._seen = seen if found is None else -1  # after a change everything is looked at until it is as it was
        return found

    def change_soon(self) -> str | None:
        """The same, looking at a part of it, another part at each call; and at all if that has changed, or may have.

        What changes all weights (moving, casting or loading the module) is found at once, and so is what is set on a
        module, as adapters are, and a storage that was resized. A change of a single tensor (`param.data = ...`) is
        found within `CALLS` calls: looking at all of some hundred weights takes longer than the rest of a call. Where
        there are at most `SAMPLE`, all are looked at in each call. Shapes and strides are compared by `change` alone.
        """
        sample = next(self._turns, None)
        if (
            self._seen == _EVENTS.count
            and (sample is None or sample.same())
            and not any(len(values) != size for values, size in self._growing)
        ):
            return None
        return self.change()


class _Slot(NamedTuple):
    """A place that holds a tensor or a submodule, and what it held at capture."""

    path: str
    owner: dict[str, Any]
    name: str
    value: Any


def _slots_outside(tensors: list[Tensor], module: nn.Module) -> list[_Slot]:
    """Slots for tensors that are no parameters or buffers: each is compared with itself, whoever has it now."""
    paths = {id(tensor): path for path, tensor in tensors_of(module)} if tensors else {}
    unknown = "a tensor {} that the module does not reach"
    return [_Slot(paths.get(id(t)) or unknown.format(describe(t)), {"": t}, "", t) for t in tensors]


_DTYPE = attrgetter("dtype")


class _Sample:
    """Some slots."""

    def __init__(self, slots: list[_Slot]) -> None:
        self._slots = slots
        self._owners = [slot.owner for slot in slots]
        self._names = [slot.name for slot in slots]
        self._values = [slot.value for slot in slots]
        self._tensors = [value for value in self._values if isinstance(value, Tensor)]
        # Of a sharded weight the address is that of its shard, which may be another tensor at any time.
        self._address = _local_address if any(is_wrapper(type(t)) for t in self._tensors) else Tensor.data_ptr
        self._addresses = [*map(self._address, self._tensors)]
        self._dtypes = [tensor.dtype for tensor in self._tensors]
        self._forms = [_form(tensor) for tensor in self._tensors]

    def same(self) -> bool:
        """Whether all slots are as they were, shapes and strides aside."""
        now = map(dict.get, self._owners, self._names)
        return (
            all(map(is_, now, self._values))
            and list(map(self._address, self._tensors)) == self._addresses
            and list(map(_DTYPE, self._tensors)) == self._dtypes
        )

    def changes(self) -> Iterator[str]:
        """What happened to those that are not."""
        before = dict(zip(map(id, self._tensors), zip(self._addresses, self._forms, strict=True), strict=True))
        for path, owner, name, value in self._slots:
            address, form = before.get(id(value), (0, ()))
            if owner.get(name) is not value:
                yield f"{path!r} was moved or replaced"
            elif isinstance(value, Tensor) and self._address(value) != address:
                yield f"{path!r} was {'moved or replaced' if self._address(value) else 'freed'}"
            elif isinstance(value, Tensor) and _form(value) != form:
                yield f"{path!r} is {_described(*_form(value))} now, and was {_described(*form)}"


def _parts_of(value: Any) -> tuple[Any, ...]:
    """A tensor, and what this rank has of it."""
    return (value, local(value)) if isinstance(value, Tensor) else (value,)


def _local_address(tensor: Tensor) -> int:
    return local(tensor).data_ptr()


def _form(tensor: Tensor) -> tuple[Any, ...]:
    tensor = local(tensor)
    return tensor.dtype, tensor.shape, tensor.stride()


def _described(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} with strides {list(stride)}"


def _grows(module: nn.Module) -> bool:
    """Whether submodules are added to a module while it is in use, as adapters are."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
