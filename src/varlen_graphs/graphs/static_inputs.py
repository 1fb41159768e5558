"""Static memory of the tensors that calls bring beside their rows."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.call import Call
from varlen_graphs.inputs.extra import PerRow
from varlen_graphs.layouts.dtypes import plain
from varlen_graphs.layouts.item_slice import ItemSlice
from varlen_graphs.layouts.packed_batch import GatherIndices, pack_rows


class StaticInputs:
    """The tensors beside the rows, shared by all budgets: each budget uses a prefix.

    Args:
        spec: The declaration.
        budgets: The budgets to hold.
        dtypes: Dtypes of the declared inputs.
        device: The device.

    Attributes:
        memory: All tensors, `[largest number of entries, *shape]` each; a tensor without entries is one entry.
    """

    def __init__(
        self, spec: BufferSpec, budgets: Sequence[Budget], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> None:
        self._declared = spec.input_extents
        self._views: dict[Budget, list[Tensor]] = {}
        self._defaults: dict[str, int] = {}  # leading entries that hold the default, of integers that graphs copy
        self.memory = []
        for (one, extent), dtype in zip(self._declared, dtypes, strict=True):
            most = max(math.prod(extent.shape(budget)) for budget in budgets)
            self.memory.append(torch.full((most, *one.shape), one.pad, dtype=dtype, device=device))

    def view(self, budget: Budget) -> dict[str, Tensor]:
        """Return what the graph of a budget reads, by name."""
        return {one.name: view for (one, _), view in zip(self._declared, self._at(budget), strict=True)}

    def part(self, item_slice: ItemSlice, budget: Budget) -> dict[str, Tensor]:
        """Return the entries of a slice at a budget, by name."""
        views = zip(self._declared, self._at(budget), strict=True)
        return {one.name: extent.part(view, item_slice) for (one, extent), view in views}

    def beside(self, call: Call) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the memory of each tensor that a call brings, and that tensor."""
        for (one, _), memory in zip(self._declared, self.memory, strict=True):
            if one.name in call.inputs:
                yield memory, call.inputs[one.name]

    def pads(self, budget: Budget) -> dict[str, Tensor]:
        """Return new tensors without content at a budget, by name."""
        return {
            one.name: memory.new_full((*extent.shape(budget), *one.shape), one.pad)
            for (one, extent), memory in zip(self._declared, self.memory, strict=True)
        }

    def fill_pads(self) -> None:
        """Overwrite all but floating tensors with their pads: an earlier call may have left ids that are too large."""
        self._defaults.clear()
        for (one, _), memory in zip(self._declared, self.memory, strict=True):
            if not memory.is_floating_point():
                memory.fill_(one.pad)

    def load(
        self,
        call: Call,
        slices: Sequence[tuple[ItemSlice, ItemSlice]],
        budget: Budget,
        gather_indices: GatherIndices | None = None,
        clears: bool = True,
    ) -> None:
        """Copy the entries of one replay, or fill in the default; one launch for all tensors of a dtype on the device.

        With the indices of real rows, tensors with an entry a row are packed on the way, in a launch each. Floating
        padding becomes `pad` if `clears`, in a launch each; graphs see to that of integers and padded batches. Queued
        on the current stream. Syncs for tensors in pinned memory, which their owner may overwrite.
        """
        together: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for (one, extent), static in zip(self._declared, self._at(budget), strict=True):
            tensor = call.inputs.get(one.name)
            if tensor is None:
                assert one.default is not None  # noqa: S101 - else the call would have been refused
                entries = math.prod(extent.shape(budget))
                if self._defaults.get(one.name, 0) < entries:
                    static.fill_(one.default)
                    if extent.dims and not static.is_floating_point():
                        self._defaults[one.name] = entries
                continue
            self._defaults.pop(one.name, None)
            if clears and len(extent.dims) == 1 and static.is_floating_point():
                end = extent.size(slices[-1][1])[0]
                if end < len(static):
                    static[end:].fill_(one.pad)
            if gather_indices is not None and isinstance(one, PerRow):
                pack_rows(tensor, call.sizes, gather_indices, static[: call.shape[0]])
                continue
            for there, here in slices if extent.dims else slices[:1]:
                target, source = extent.part(static, here), extent.part(tensor, there)
                if source.dtype == target.dtype and source.device == target.device:
                    targets, sources = together.setdefault(target.dtype, ([], []))
                    targets.append(plain(target))
                    sources.append(plain(source))
                else:
                    target.copy_(source, non_blocking=source.is_cuda or not source.is_pinned())
        for targets, sources in together.values():
            torch._foreach_copy_(targets, sources)

    def _at(self, budget: Budget) -> list[Tensor]:
        """Return the entries of a budget, as the forward takes them."""
        if budget not in self._views:
            self._views[budget] = []
            for (one, extent), memory in zip(self._declared, self.memory, strict=True):
                sizes = extent.shape(budget)
                self._views[budget].append(memory[: math.prod(sizes)].view((*sizes, *one.shape)))
        return self._views[budget]
