"""Memory that graphs read beside the registered parameters and buffers of their module."""

from typing import Any

from torch import Tensor, nn

from varlen_graphs.watch.owners import ReachableValue, address_of, describe
from varlen_graphs.watch.sharded import local_tensor
from varlen_graphs.watch.slots import Place, Slot


class UnregisteredMemory:
    """Slots for the memory that graphs read, or may read (`state`), and that their module does not register.

    A parameter or buffer of a module that is no part of this one is compared with the entry of that module, and so are
    the modules around it. Any other tensor is compared with itself, whoever holds it; `unowned` describes those that
    nothing reaches, where this detects little if a tensor was made for one use.
    """

    def __init__(
        self, reached: list[ReachableValue], read: list[Tensor], state: list[Tensor], known: list[Slot]
    ) -> None:
        addresses = {*map(address_of, (*read, *state))} - {0}
        places = {_key(slot.place) for slot in known}
        objects = {id(part) for slot in known for part in _with_local(slot.value)}
        held_by = {id(found.value): found for found in reached if isinstance(found.value, nn.Module)}
        owned = {0}
        self.slots: list[Slot] = []
        self.modules: list[tuple[str, nn.Module]] = []  # the other modules, by the beginning of paths into them
        self.roots: list[ReachableValue] = []  # the outermost of them
        for found in reached:
            tensor, inside = found.value, found.module
            if not isinstance(tensor, Tensor) or (address := address_of(tensor)) not in addresses:
                continue
            owned.add(address)
            if found.holder is None:
                if id(tensor) not in objects:
                    self.slots.append(Slot.of(found.path, tensor))
                    objects.add(id(tensor))
            elif _key(found.holder) not in places:
                self.slots.append(Slot(found.path, found.holder, tensor))
                while inside is not None and all(inside is not other for _, other in self.modules):
                    around = held_by[id(inside)]
                    self.modules.append((f"{around.path}.", inside))
                    if around.holder is None:
                        self.roots.append(around)
                    else:
                        self.slots.append(Slot(around.path, around.holder, inside))
                    inside = around.module
        unowned = [tensor for tensor in read if address_of(tensor) not in owned and id(tensor) not in objects]
        self.unowned = [*map(describe, unowned)]
        unknown = "a tensor {} that is not reachable from the module"
        unowned += [tensor for tensor in state if address_of(tensor) not in owned]
        self.slots += [Slot.of(unknown.format(describe(t)), t) for t in unowned]


def _key(place: Place) -> tuple[int, str, str]:
    return id(place.owner), place.registry, place.name


def _with_local(value: Any) -> tuple[Any, ...]:
    return (value, local_tensor(value)) if isinstance(value, Tensor) else (value,)
