"""Slots that hold tensors and submodules, and comparison of their values with those at capture."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varlen_graphs.shadows.snapshot import ABSENT, Place, alike
from varlen_graphs.torch_dispatch.sharded import is_distributed_tensor, local_tensor

_FORM = attrgetter("dtype", "shape")


class Change(NamedTuple):
    """A change that invalidates graphs.

    Attributes:
        what: What changed, for messages.
        of_cache: True if the module makes that itself: a tensor that a state dict leaves out, or what its runs add.
        path: Path of what changed, if that is one.
        of_attribute: True if no memory changed, but something else that the module holds, which no graph reads again.
    """

    what: str
    of_cache: bool = False
    path: str = ""
    of_attribute: bool = False


class Slot(NamedTuple):
    """Place of a tensor or a submodule, with its value at capture."""

    path: str  # for messages
    place: Place
    value: Any
    is_cache: bool = False

    @classmethod
    def of(cls, path: str, tensor: Tensor) -> "Slot":
        """Return a slot for a tensor that is compared with itself, whoever holds it."""
        return cls(path, Place({"": {"": tensor}}, "", ""), tensor)


Registry = tuple[Any, str]
"""The attributes of a module, and the name of a registry among them."""

Entries = tuple[Any, list[Any]]
"""A dict, such as the attributes of a module, a list, deque, set or object with slots, and keys of entries of it."""


GETTERS: dict[type, Callable[[Any, Any], Any]] = {
    dict: dict.get,
    list: list.__getitem__,
    deque: deque.__getitem__,
    set: set.__contains__,
}

CONTAINERS = (dict, list, deque, set)
"""Classes of which the number of entries is compared, too."""


class SlotGroup:
    """Some slots, prepared for fast comparison in the registries that their modules have now.

    Args:
        slots: The slots.
        registries: Registries whose objects and sizes are compared, too; of submodules also the order.
        entries: Entries that graphs have frozen, which are compared, and the number of all.
    """

    def __init__(self, slots: list[Slot], registries: Sequence[Registry] = (), entries: Sequence[Entries] = ()) -> None:
        self._slots = slots
        self._containers = [own for own, _ in entries if isinstance(own, CONTAINERS)]
        self._counts = [*map(len, self._containers)]
        getters = [(_getter(own), keys) for own, keys in entries if keys]
        self._entries = [(get, keys, [*map(get, keys)]) for get, keys in getters]
        self._owners, self._registry_names = [own for own, _ in registries], [name for _, name in registries]
        self._whole = [own[name] for own, name in registries]
        self._sizes = [*map(len, self._whole)]
        submodules = [own for own, (_, name) in zip(self._whole, registries, strict=True) if name == "_modules"]
        self._parts = [own for own in submodules if len(own) > 1]  # a few of many: others have no order
        self._orders = [*map(list, self._parts)]
        self._registries = [slot.place.owner[slot.place.registry] for slot in slots]
        self._names = [slot.place.name for slot in slots]
        self._values = [slot.value for slot in slots]
        self._tensors = [value for value in self._values if isinstance(value, Tensor)]
        # The address of a sharded weight is that of its shard, which can become another tensor at any time.
        odd = any(is_distributed_tensor(type(one)) or one.layout is not torch.strided for one in self._tensors)
        self._address = _local_address if odd else Tensor.data_ptr
        self._addresses = [*map(self._address, self._tensors)]
        self._forms = [*map(_FORM, self._tensors)]
        self._stride = _stride if odd else Tensor.stride
        self._strides = [*map(self._stride, self._tensors)]
        self._formats = [_format(tensor) for tensor in self._tensors]

    def unchanged(self) -> bool:
        """Return True if all slots hold the same objects, at the same addresses and in the same form.

        And if the registries are the same objects, with as many entries, submodules are in the same order, and other
        entries are as they were.
        """
        return (
            list(map(len, self._containers)) == self._counts
            and self._has_entries()
            and all(map(is_, map(dict.get, self._owners, self._registry_names), self._whole))
            and list(map(len, self._whole)) == self._sizes
            and list(map(list, self._parts)) == self._orders
            and all(map(is_, map(dict.get, self._registries, self._names), self._values))
            and list(map(self._address, self._tensors)) == self._addresses
            and list(map(_FORM, self._tensors)) == self._forms
            and list(map(self._stride, self._tensors)) == self._strides
        )

    def _has_entries(self) -> bool:
        for get, keys, values in self._entries:
            now = [*map(get, keys)]
            if not (all(map(is_, now, values)) or all(map(alike, now, values))):
                return False
        return True

    def changes(self) -> Iterator[Change]:
        """Describe each slot that changed, in shape or strides too."""
        before = dict(zip(map(id, self._tensors), zip(self._addresses, self._formats, strict=True), strict=True))
        for path, (owner, registry, name), value, is_cache in self._slots:
            address, form = before.get(id(value), (0, ()))
            if owner[registry].get(name) is not value:
                yield Change(f"{path!r} was moved or replaced", is_cache, path)
            elif isinstance(value, Tensor) and self._address(value) != address:
                yield Change(f"{path!r} was {'moved or replaced' if self._address(value) else 'freed'}")
            elif isinstance(value, Tensor) and _format(value) != form:
                yield Change(f"{path!r} changed from {_describe_format(*form)} to {_describe_format(*_format(value))}")


def _getter(own: Any) -> Callable[[Any], Any]:
    """Return what gets an entry, whatever a subclass makes of that."""
    for kind, get in GETTERS.items():
        if isinstance(own, kind):
            return partial(get, own)
    return partial(_slot, own)


def _slot(own: Any, name: str) -> Any:
    try:
        return object.__getattribute__(own, name)
    except AttributeError:
        return ABSENT


def _local_address(tensor: Tensor) -> int:
    plain = local_tensor(tensor)
    return plain.data_ptr() if plain.layout is torch.strided else 0  # a sparse one has no memory of its own


def _stride(tensor: Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is torch.strided else ()


def _format(tensor: Tensor) -> tuple[Any, ...]:
    tensor = local_tensor(tensor)
    return tensor.dtype, tensor.shape, _stride(tensor)


def _describe_format(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} with strides {list(stride)}"
