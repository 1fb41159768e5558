"""Detection of changes to a module, and to memory, that invalidate captured graphs."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from varlen_graphs.watch.attributes import AttributeSnapshot
from varlen_graphs.watch.change_hooks import count_changes
from varlen_graphs.watch.owners import REGISTERED, address_of, reachable_values
from varlen_graphs.watch.sharded import local_tensor
from varlen_graphs.watch.slots import Place, Slot, SlotGroup
from varlen_graphs.watch.unregistered import UnregisteredMemory

CALLS = 64
"""A change of a single tensor is found within this many calls."""

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Modules to which submodules are added while they are in use, as adapters are."""

SAMPLE = 8
"""Each call compares at least this many tensors and submodules."""


class ModuleGuard:
    """Detects changes that invalidate graphs: to parameters, buffers and submodules, and to other memory that is read.

    Values may change in place, because graphs read them at each replay. Memory that is moved, replaced, or read as
    another dtype or shape invalidates a graph. So does a storage that is resized in place, as sharding and offloading
    do: this frees the memory even though references to it are held.

    Memory that graphs read (`read` and `state` as in `ReadMemory`) is guarded wherever the module, or a callable in
    `also`, reaches it: in every view of it, and in modules that lie in lists, closures or globals. Assigning another
    tensor to a plain attribute is not a change: modules do that with their caches, and graphs read the old tensor. Nor
    is another tensor in a buffer that is not saved and that no graph reads.
    """

    def __init__(
        self,
        module: nn.Module,
        read: Iterable[Tensor],
        state: Iterable[Tensor] = (),
        also: Mapping[str, Any] | None = None,
        attributes: AttributeSnapshot | None = None,
    ) -> None:
        owners = [
            (f"{prefix}." if prefix else "", owner)
            for prefix, owner in module.named_modules()
            if not isinstance(owner, torch.jit.ScriptModule)  # makes its submodules anew whenever it is asked
        ]
        registered = [
            Slot(f"{prefix}{name}", Place(vars(owner), registry, name), value)
            for prefix, owner in owners
            for registry in REGISTERED
            for name, value in vars(owner)[registry].items()
        ]
        read, state = [*read], [*state]
        addresses = {*map(address_of, (*read, *state))}
        slots = [slot for slot in registered if not (_is_cache(slot) and address_of(slot.value) not in addresses)]
        unregistered = UnregisteredMemory([*reachable_values(module, also)], read, state, slots)
        self.unowned = unregistered.unowned
        outside = unregistered.slots
        slots += outside
        tensors = [slot.value for slot in (*registered, *outside) if isinstance(slot.value, Tensor)]
        self._memory = [local_tensor(tensor).detach() for tensor in tensors]  # keeps it alive
        owners += unregistered.modules
        self._names = [
            (prefix.rstrip("."), vars(owner), registry, [*vars(owner)[registry]])
            for prefix, owner in owners
            for registry in REGISTERED
        ]
        self._containers = [vars(owner) for _, owner in owners if isinstance(owner, CONTAINERS)]
        self._roots = unregistered.roots
        self._attributes = attributes
        slots.sort(key=lambda slot: not isinstance(slot.value, nn.Parameter))  # so that each sample gets some
        self.events = count_changes([owner for _, owner in owners], self._memory)
        self._seen = self.events.count
        self._was_changed = False
        self._slots = slots
        self._always = [*outside[:SAMPLE], *slots[:1]]  # unregistered memory is the likeliest to change
        self._prepare()

    def _prepare(self) -> None:
        """Prepare comparisons in the registries of now."""
        count = _odd_prime(min(CALLS, -(-len(self._slots) // SAMPLE)))
        self._all = SlotGroup(self._slots)
        self._samples = cycle([SlotGroup([*self._always, *self._slots[at::count]]) for at in range(count)])
        # No event tells of these: `insert` makes the registry of a container longer, `pop` makes another one.
        self._contents = [(own, own["_modules"], len(own["_modules"])) for own in self._containers]

    def find_change(self) -> str | None:
        """Compare everything, and describe the first change, if any."""
        seen = self.events.count
        found = next(self._all.changes(), None) or next(self._other_changes(), None)
        self._was_changed |= found is not None  # once undone it may come again, as with `functional_call`
        self._seen = -1 if self._was_changed else seen  # then every call compares everything
        if found is None and not self._contents_unchanged():
            self._prepare()
        return found

    def _other_changes(self) -> Iterator[str]:
        for path, owner, registry, names in self._names:
            if owner[registry].keys() != {*names}:
                yield f"{path or 'the module'!r} gained or lost a parameter, buffer or submodule"
            elif [*owner[registry]] != names:
                yield f"{path or 'the module'!r} has its parameters, buffers or submodules in another order"
        for root in self._roots:
            if not root.still_reachable():
                yield f"the module at {root.path!r} was replaced"
        if self._attributes is not None:
            yield from self._attributes.changes()

    def find_change_sampled(self) -> str | None:
        """Compare one sample, a different one at each call, and everything if the sample or an event shows a change.

        Changes of all weights (moving, casting or loading the module), registrations and resizes are found at once, a
        change of a single tensor (`param.data = ...`) within `CALLS` calls: comparing some hundred weights takes longer
        than the rest of a call. Modules that are replaced in lists, dicts and closures, and the attribute snapshot are
        compared by `find_change` only.
        """
        sample = next(self._samples, None)
        same = self._seen == self.events.count and (sample is None or sample.unchanged())
        return None if same and self._contents_unchanged() else self.find_change()

    def _contents_unchanged(self) -> bool:
        for own, parts, size in self._contents:  # noqa: SIM110 - a generator costs a call an entry
            if own["_modules"] is not parts or len(parts) != size:
                return False
        return True


def _odd_prime(most: int) -> int:
    """Return the largest odd prime up to `most`, or 1.

    With so many samples, a tensor that is replaced in every other call only, as by `functional_call`, meets each.
    """
    odd = range(3, most + 1, 2)
    return max((one for one in odd if all(one % divisor for divisor in odd if divisor < one)), default=1)


def _is_cache(slot: Slot) -> bool:
    """Return True for a buffer that state dicts leave out: modules replace it when they meet larger inputs."""
    owner, registry, name = slot.place
    return registry == "_buffers" and isinstance(slot.value, Tensor) and name in owner["_non_persistent_buffers_set"]
