"""Detection of changes to a module, and to memory, that invalidate captured graphs."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from varlen_graphs.watch.attributes import AttributeSnapshot
from varlen_graphs.watch.change_hooks import count_changes
from varlen_graphs.watch.owners import reachable_values
from varlen_graphs.watch.sharded import local_tensor
from varlen_graphs.watch.slots import Slot, SlotGroup
from varlen_graphs.watch.unregistered import UnregisteredMemory

CALLS = 64
"""A change of a single tensor is found within this many calls."""

SAMPLE = 8
"""Each call compares at least this many tensors and submodules."""


class ModuleGuard:
    """Detects changes that invalidate graphs: to parameters, buffers and submodules, and to other memory that is read.

    Values may change in place, because graphs read them at each replay. Memory that is moved, replaced, or read as
    another dtype or shape invalidates a graph. So does a storage that is resized in place, as sharding and offloading
    do: this frees the memory even though references to it are held.

    Memory that graphs read (`read` and `state` as in `ReadMemory`) is guarded wherever the module, or a callable in
    `also`, reaches it: in every view of it, and in modules that lie in lists, closures or globals. Assigning another
    tensor to a plain attribute is not a change: modules do that with their caches, and graphs read the old tensor.
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
        registries = [(p, values) for p, m in owners for values in (m._parameters, m._buffers, m._modules)]
        slots = [Slot(f"{prefix}{k}", values, k, v) for prefix, values in registries for k, v in values.items()]
        unregistered = UnregisteredMemory([*reachable_values(module, also)], [*read], [*state], slots)
        self.unowned = unregistered.unowned
        outside = unregistered.slots
        slots += outside
        tensors = [slot.value for slot in slots if isinstance(slot.value, Tensor)]
        self._memory = [local_tensor(tensor).detach() for tensor in tensors]  # keeps it alive
        self._sizes = [(prefix.rstrip("."), values, len(values)) for prefix, values in registries]
        self._growing = [(owner._modules, len(owner._modules)) for _, owner in owners if _grows(owner)]
        self._roots = unregistered.roots
        self._attributes = attributes
        slots.sort(key=lambda slot: not isinstance(slot.value, nn.Parameter))  # so that each sample gets some
        self.events = count_changes([*(owner for _, owner in owners), *unregistered.modules], self._memory)
        self._seen = self.events.count
        count = min(CALLS, -(-len(slots) // SAMPLE))
        always = [*outside[:SAMPLE], *slots[:1]]  # unregistered memory is the likeliest to change
        self._all = SlotGroup(slots)
        self._samples = cycle([SlotGroup([*always, *slots[at::count]]) for at in range(count)])

    def find_change(self) -> str | None:
        """Compare everything, and describe the first change, if any."""
        seen = self.events.count
        found = next(self._all.changes(), None) or next(self._other_changes(), None)
        self._seen = seen if found is None else -1  # after a change, every call compares everything until it is undone
        return found

    def _other_changes(self) -> Iterator[str]:
        for path, values, size in self._sizes:
            if len(values) != size:
                yield f"{path or 'the module'!r} gained or lost a parameter, buffer or submodule"
        for root in self._roots:
            if not root.still_reachable():
                yield f"the module at {root.path!r} was replaced"
        if self._attributes is not None:
            yield from self._attributes.changes()

    def find_change_sampled(self) -> str | None:
        """Compare one sample, a different one at each call, and everything if the sample or an event shows a change.

        Changes of all weights (moving, casting or loading the module), registrations and resizes are found at once, a
        change of a single tensor (`param.data = ...`) within `CALLS` calls: comparing some hundred weights takes longer
        than the rest of a call. Shapes and strides, modules that are replaced in lists, dicts and closures, and the
        attribute snapshot are compared by `find_change` only.
        """
        sample = next(self._samples, None)
        same = self._seen == self.events.count and (sample is None or sample.unchanged())
        if same and not any(len(values) != size for values, size in self._growing):
            return None
        return self.find_change()


def _grows(module: nn.Module) -> bool:
    """Return True for containers to which submodules are added while they are in use, as adapters are."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
