"""Detection of changes to a module, and to memory, that invalidate captured graphs."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from varlen_graphs.guards.held_entries import HeldEntries
from varlen_graphs.guards.slots import Change, Slot, SlotGroup
from varlen_graphs.shadows.shadow import REGISTRIES, address_of, describe, held_by
from varlen_graphs.shadows.snapshot import Place, Snapshot
from varlen_graphs.torch_dispatch.sharded import local_tensor

CALLS = 64
"""A change of a single tensor is found within this many calls."""

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Modules to which submodules are added while they are in use, as adapters are."""

SAMPLE = 8
"""Each call compares at least this many tensors and submodules."""


class ModuleGuard:
    """Detects changes that invalidate graphs: to parameters, buffers and submodules, and to other memory that is read.

    Values may change in place, because graphs read them at each replay. Memory that is moved, replaced, freed, or read
    as another dtype or shape invalidates a graph. Assigning another tensor to a place where one was found that graphs
    read is a change, too.

    Args:
        module: The module.
        beside: Functions and objects that run beside it, by name.
        read: Tensors that the graphs read.
        own: Addresses of memory that graphs read, and that captures made for them alone.
        snapshot: What the module kept at the first capture.
        moving: Paths of what runs change, and that changes no output.

    Attributes:
        unowned: Descriptions of tensors that neither the module nor a capture holds.
    """

    def __init__(
        self,
        module: nn.Module,
        beside: Mapping[str, Any],
        read: Iterable[Tensor],
        own: Collection[int] = (),
        snapshot: Snapshot | None = None,
        moving: AbstractSet[str] = frozenset(),
    ) -> None:
        read, self._own = [*read], {*own}
        addresses = self._addresses = {*map(address_of, read)} - {0, *own}
        self._module, self._beside = module, beside
        held, named = held_by(module, beside), dict(module.named_modules())
        found = {id(part): (path, part) for path, part in named.items()} | {
            id(one.value): (one.path, one.value)
            for one in held
            if one.path not in named and isinstance(one.value, nn.Module) and _reads(one.value, addresses)
        }
        owners = [
            (f"{path}." if path else "", owner)
            for path, owner in found.values()
            if not isinstance(owner, torch.jit.ScriptModule)  # makes its submodules anew whenever it is asked
        ]
        registered = [
            Slot(f"{prefix}{name}", Place(owner.__dict__, registry, name), value)
            for prefix, owner in owners
            for registry in REGISTRIES
            for name, value in vars(owner)[registry].items()
        ]
        slots = [
            slot._replace(is_cache=_is_cache(slot))
            for slot in registered
            if not (_is_cache(slot) and address_of(slot.value) not in addresses)
        ]
        places = {_key(slot.place) for slot in slots}
        others = [one for one in held if one.place is None or _key(one.place) not in places]
        outside = [
            Slot.of(one.path, one.value) if one.place is None else Slot(one.path, one.place, one.value, is_cache=True)
            for one in others
            if isinstance(one.value, Tensor) and address_of(one.value) in addresses
        ]
        self._others = {one.path: one.value for one in others if id(one.value) in found and one.path}
        owned = {0, *own, *(address_of(one.value) for one in held if isinstance(one.value, Tensor))}
        unowned = [tensor for tensor in read if address_of(tensor) not in owned]
        self.unowned = [*map(describe, unowned)]
        outside += [Slot.of(f"a tensor {describe(one)} that the module does not hold", one) for one in unowned]
        slots += outside
        tensors = [slot.value for slot in (*registered, *outside) if isinstance(slot.value, Tensor)]
        self._memory = [local_tensor(tensor).detach() for tensor in tensors]  # keeps it alive
        self._names = [
            (prefix.rstrip("."), vars(owner), registry, [*vars(owner)[registry]])
            for prefix, owner in owners
            for registry in REGISTRIES
        ]
        self._containers = [vars(owner) for _, owner in owners if isinstance(owner, CONTAINERS)]
        self._moving = moving
        self._forms = [(path, owner, type(owner), _forward_override(owner)) for path, owner in named.items()]
        self._held = HeldEntries(named, beside, snapshot or Snapshot(), moving, addresses)
        slots.sort(key=lambda slot: not isinstance(slot.value, nn.Parameter))  # so that each sample gets some
        self._was_changed = False
        self._slots = slots
        self._always = [*outside[:SAMPLE], *slots[:1]]  # unregistered memory is the likeliest to change
        self._prepare()

    def covers(self, read: Iterable[Tensor], own: Collection[int]) -> bool:
        """Return True if this guards what graphs read that read these tensors, and no more; see the arguments."""
        return self._own == {*own} and self._addresses == {*map(address_of, read)} - {0, *own}

    def _prepare(self) -> None:
        """Prepare comparisons in the registries of now."""
        # A replay of the tape over freed memory would end the process, so there each sample is all.
        on_host = not any(memory.is_cuda for memory in self._memory)
        entries = self._held.chunks()
        count = 1 if on_host else _odd_prime(min(CALLS, -(-max(len(self._slots), len(entries)) // SAMPLE)))
        self._all = SlotGroup(self._slots)
        registries = [(owner, name) for _, owner, name, _ in self._names]
        # No event tells of these: `insert` makes the registry of a container longer, `pop` makes another one.
        contents = [(own, "_modules") for own in self._containers]
        self._samples = cycle(
            [
                SlotGroup(
                    [*self._always, *self._slots[at::count]], [*contents, *registries[at::count]], entries[at::count]
                )
                for at in range(count)
            ]
        )

    def find_change(self) -> Change | None:
        """Compare everything, and describe the first change, if any."""
        found = next(self._all.changes(), None)
        if found is not None and found.path in self._moving:
            found = found._replace(of_cache=True)
        found = found or next(self._changed_registries(), None)
        if found is None and (other := next(self._other_changes(), None)) is not None:
            found = Change(other, of_attribute=True)
        self._was_changed = self._was_changed or found is not None
        if found is None:  # a registry may have been made anew, with the same entries
            self._prepare()
        return found

    def _changed_registries(self) -> Iterator[Change]:
        for path, owner, registry, names in self._names:
            if changed := owner[registry].keys() ^ {*names}:
                by_itself = all(f"{path}.{name}".lstrip(".") in self._moving for name in changed)
                yield Change(f"{path or 'the module'!r} gained or lost a parameter, buffer or submodule", by_itself)
            elif [*owner[registry]] != names:
                yield Change(f"{path or 'the module'!r} has its parameters, buffers or submodules in another order")

    def _other_changes(self) -> Iterator[str]:
        if self._others:
            now = {one.path: one.value for one in held_by(self._module, self._beside)}
            yield from (
                f"the module at {path!r} was replaced"
                for path, part in self._others.items()
                if now.get(path) is not part
            )
        for path, part, kind, forward in self._forms:
            what = repr(path) if path else "the module"
            if type(part) is not kind:
                yield f"the class of {what} changed from {kind.__name__} to {type(part).__name__}"
            if _forward_override(part) != forward:
                yield f"the forward of {what} was replaced"
        yield from self._held.changes()

    def find_change_sampled(self) -> Change | None:
        """Compare one sample, a different one at each call, and everything if the sample shows a change.

        Changes of all weights (moving, casting or loading the module), and containers that grow or shrink, are found at
        once, a change of a single tensor, registration or entry within `CALLS` calls: comparing some hundred weights
        takes longer than the rest of a call. Of tensors in closures only the memory is compared. What was changed once
        may change again, so then every call compares everything.
        """
        sample = next(self._samples)
        return self.find_change() if self._was_changed or not sample.unchanged() else None


def _odd_prime(most: int) -> int:
    """Return the largest odd prime up to `most`, or 1.

    With so many samples, a tensor that is replaced in every other call only, as by `functional_call`, meets each.
    """
    odd = range(3, most + 1, 2)
    return max((one for one in odd if all(one % divisor for divisor in odd if divisor < one)), default=1)


def _forward_override(module: nn.Module) -> Any:
    """Return the `forward` set on the instance; `None` if there is none, or that of its class, or one of an encoder."""
    forward = vars(module).get("forward")
    if getattr(forward, "is_of_class", False):  # an encoder is being made
        return None
    owner = getattr(forward, "__self__", forward)
    if owner is module and getattr(forward, "__func__", None) is type(module).forward:
        return None  # transformers 4.57 leaves it there where it has collected hidden states
    return None if type(owner).__module__.startswith("varlen_graphs.") else forward


def _is_cache(slot: Slot) -> bool:
    """Return True for a buffer that state dicts leave out: modules replace it when they meet larger inputs."""
    owner, registry, name = slot.place
    return registry == "_buffers" and isinstance(slot.value, Tensor) and name in owner["_non_persistent_buffers_set"]


def _reads(part: nn.Module, addresses: Collection[int]) -> bool:
    """Return True if graphs read a weight of a module."""
    return any(address_of(tensor) in addresses for tensor in (*part.parameters(), *part.buffers()))


def _key(place: Place) -> tuple[int, str, Any]:
    owner = place.owner if place.registry else place.owner[""]
    return id(owner), place.registry, place.name
