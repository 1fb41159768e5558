"""Whether the memory that graphs read is still where, and what, it was when they were captured."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from itertools import cycle
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn

from varlen_graphs.watch.attributes import Attributes
from varlen_graphs.watch.owners import Found, describe, memory_of, reached_from
from varlen_graphs.watch.sharded import is_wrapper, local

CALLS = 64
"""A change of a single tensor is found within so many calls."""

SAMPLE = 8
"""At least so many tensors and submodules are looked at in each call."""


class _Watched:
    """What a guard looks after, and how often something happened to that.

    Args:
        modules: Its modules.
        tensors: Its tensors.
    """

    def __init__(self, modules: Iterable[nn.Module], tensors: Iterable[Tensor]) -> None:
        self.count = 0
        self._held = [*modules]  # so that their ids stay theirs
        self._modules = frozenset(map(id, self._held))
        self._storages = frozenset(filter(None, map(_storage, tensors)))

    def module_event(self, module: nn.Module) -> None:
        """Something is set on a module."""
        if id(module) in self._modules:
            self.count += 1

    def storage_event(self, storage: int | None) -> None:
        """A storage is resized."""
        if storage in self._storages:
            self.count += 1


class _Events:
    """Tells guards what may void graphs: what is set on their modules, and their storages resized in place.

    Torch has hooks for parameters, buffers and submodules, and none for `UntypedStorage.resize_`, by which sharding
    frees the memory of weights, nor for `Tensor.resize_`: functions that tell are put around these. What happens to
    modules and storages of others costs a guard nothing.
    """

    def __init__(self) -> None:
        self._guards: tuple[weakref.ref[_Watched], ...] = ()
        self._lock = threading.Lock()
        self._telling = False

    def begin(self, watched: _Watched) -> None:
        """Tell of what happens from now on, as long as `watched` lives."""
        with self._lock:
            self._guards = (*(guard for guard in self._guards if guard() is not None), weakref.ref(watched))
            if not self._telling:
                self._telling = True
                torch_module.register_module_parameter_registration_hook(self._set)
                torch_module.register_module_buffer_registration_hook(self._set)
                torch_module.register_module_module_registration_hook(self._set)
                torch.UntypedStorage.resize_ = self._told(torch.UntypedStorage.resize_)  # type: ignore[method-assign]
                torch.Tensor.resize_ = self._told(torch.Tensor.resize_)  # type: ignore[method-assign]
                torch.Tensor.resize_as_ = self._told(torch.Tensor.resize_as_)  # type: ignore[method-assign]

    def _set(self, module: nn.Module, *what: Any) -> None:
        for reference in self._guards:
            if (guard := reference()) is not None:
                guard.module_event(module)

    def _told(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(resize)
        def told(resized: Any, *args: Any, **kwargs: Any) -> Any:
            for reference in self._guards:
                if (guard := reference()) is not None:
                    guard.storage_event(_storage(resized))
            return resize(resized, *args, **kwargs)

        return told


_EVENTS = _Events()


class Guard:
    """The parameters, buffers and submodules of a module, and what else its graphs read, held as they are now.

    Changing values in place is fine, because graphs read them at each replay. Other memory is not, nor memory that is
    read as another dtype or shape; nor is a storage that was resized in place, as sharding and offloading do, which
    frees what graphs read however it is held.

    Memory that graphs read is looked after wherever the module reaches it: in each view of it, and in modules that are
    in lists, closures or globals, whose weights are to stay as those of its own parts are.

    A plain attribute that is set to another tensor is none of these: modules do that with their caches. Graphs go on
    reading the tensor that it was.

    Args:
        module: The module.
        read: What graphs read, parameters and buffers or not, as `ReadMemory.read` has it.
        state: What they may read, as `ReadMemory.state` has it.
        also: What runs in the place of the module's forward or beside it, by name.
        attributes: What else the module's forward was when it ran.

    Attributes:
        unowned: What is read and reached by nothing that could be looked at, for people.
    """

    def __init__(
        self,
        module: nn.Module,
        read: Iterable[Tensor],
        state: Iterable[Tensor] = (),
        also: Mapping[str, Any] | None = None,
        attributes: Attributes | None = None,
    ) -> None:
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
        elsewhere = _Elsewhere([*reached_from(module, also)], [*read], [*state], slots)
        self.unowned = elsewhere.unowned
        outside = elsewhere.slots
        slots += outside
        tensors = [slot.value for slot in slots if isinstance(slot.value, Tensor)]
        self._memory = [local(tensor).detach() for tensor in tensors]  # nothing frees it
        self._sizes = [(prefix.rstrip("."), values, len(values)) for prefix, values in places]
        self._growing = [(owner._modules, len(owner._modules)) for _, owner in owners if _grows(owner)]
        self._ways = elsewhere.ways
        self._attributes = attributes
        slots.sort(key=lambda slot: not isinstance(slot.value, nn.Parameter))  # so that each sample gets some
        self._events = _Watched([*(owner for _, owner in owners), *elsewhere.modules], self._memory)
        _EVENTS.begin(self._events)
        self._seen = self._events.count
        count = min(CALLS, -(-len(slots) // SAMPLE))
        always = [*outside[:SAMPLE], *slots[:1]]  # memory outside is the likeliest to go
        self._all = _Sample(slots)
        self._turns = cycle([_Sample([*always, *slots[at::count]]) for at in range(count)])

    def change(self) -> str | None:
        """What is not as it was, of all there is."""
        seen = self._events.count
        found = next(self._all.changes(), None) or next(self._other_changes(), None)
        self._seen = seen if found is None else -1  # after a change everything is looked at until it is as it was
        return found

    def _other_changes(self) -> Iterator[str]:
        for path, values, size in self._sizes:
            if len(values) != size:
                yield f"{path or 'the module'!r} got or lost a part"
        for found in self._ways:
            if not found.is_there():
                yield f"the module at {found.path!r} was replaced"
        if self._attributes is not None:
            yield from self._attributes.changes()

    def change_soon(self) -> str | None:
        """The same, looking at a part of it, another part at each call; and at all if that has changed, or may have.

        What changes all weights (moving, casting or loading the module) is found at once, and so is what is set on a
        module, as adapters are, and a storage that was resized. A change of a single tensor (`param.data = ...`) is
        found within `CALLS` calls: looking at all of some hundred weights takes longer than the rest of a call. Where
        there are at most `SAMPLE`, all are looked at in each call. Shapes and strides, modules that are replaced in
        lists, dicts and closures, and what `Attributes` has are compared by `change` alone.
        """
        sample = next(self._turns, None)
        if (
            self._seen == self._events.count
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


class _Elsewhere:
    """Where memory that graphs read is, beside the parameters and buffers of the module.

    Attributes:
        slots: One for each tensor there. What is registered on a module that is no part of this one is compared with
            what is registered then, and so are the modules around it; another tensor with itself, whoever has it.
        modules: Those modules.
        ways: How the outermost of them were reached.
        unowned: What nothing reaches: it is compared with itself, which sees little if it was made for one use.
    """

    def __init__(self, reached: list[Found], read: list[Tensor], state: list[Tensor], known: list[_Slot]) -> None:
        addresses = {*map(memory_of, (*read, *state))} - {0}
        places = {(id(slot.owner), slot.name) for slot in known}
        objects = {id(part) for slot in known for part in _parts_of(slot.value)}
        held_by = {id(found.value): found for found in reached if isinstance(found.value, nn.Module)}
        owned = {0}
        self.slots: list[_Slot] = []
        self.modules: list[nn.Module] = []
        self.ways: list[Found] = []
        for found in reached:
            tensor, inside = found.value, found.module
            if not isinstance(tensor, Tensor) or (address := memory_of(tensor)) not in addresses:
                continue
            owned.add(address)
            if found.holder is None:
                if id(tensor) not in objects:
                    self.slots.append(_Slot(found.path, {"": tensor}, "", tensor))
                    objects.add(id(tensor))
            elif (id(found.holder[0]), found.holder[1]) not in places:
                self.slots.append(_Slot(found.path, *found.holder, tensor))
                while inside is not None and all(inside is not other for other in self.modules):
                    self.modules.append(inside)
                    around = held_by[id(inside)]
                    if around.holder is None:
                        self.ways.append(around)
                    else:
                        self.slots.append(_Slot(around.path, *around.holder, inside))
                    inside = around.module
        unowned = [tensor for tensor in read if memory_of(tensor) not in owned and id(tensor) not in objects]
        self.unowned = [*map(describe, unowned)]
        unknown = "a tensor {} that the module does not reach"
        unowned += [tensor for tensor in state if memory_of(tensor) not in owned]
        self.slots += [_Slot(unknown.format(describe(t)), {"": t}, "", t) for t in unowned]


def _storage(value: Any) -> int | None:
    """What tells the storage of a tensor, or a storage, from others that live."""
    try:
        storage = value if isinstance(value, torch.UntypedStorage) else value.untyped_storage()
    except (AttributeError, RuntimeError, NotImplementedError):  # sparse, or made of other tensors
        return None
    return int(storage._cdata)


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
