"""From the static outputs of replays to tensors of the caller's own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from varlen_graphs.outputs import Extent
from varlen_graphs.packing import Span


class Collected:
    """The outputs of one call, filled run by run.

    Args:
        everything: All rows and items of the call.

    Attributes:
        everything: As given.
        tensors: One for each tensor of the output, with an entry for every active one; empty before the first run.
    """

    def __init__(self, everything: Span) -> None:
        self.everything = everything
        self.tensors: list[Tensor] = []

    def take(self, outputs: Sequence[Tensor], extents: Sequence[Extent], spans: Sequence[tuple[Span, Span]]) -> None:
        """Copy what a run gave to its places, in one launch for each dtype. Queued on the current stream; no sync.

        Args:
            outputs: The outputs of the run, padding included.
            extents: What each of them is.
            spans: Where its rows and items are in the call, and where in the run.
        """
        targets, sources = [], []
        for there, here in spans:
            parts = [output[extent.place(here)] for output, extent in zip(outputs, extents, strict=True)]
            sources += parts
            if there == self.everything:
                self.tensors = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in parts]
                targets += self.tensors
            else:
                self.tensors = self.tensors or [self._allocate(*pair) for pair in zip(outputs, extents, strict=True)]
                targets += [own[extent.place(there)] for own, extent in zip(self.tensors, extents, strict=True)]
        copy_all(targets, sources)

    def add(self, veil: Tensor) -> None:
        """Add a scalar on the device to all floating tensors. Queued on the current stream; no sync."""
        for dtype in {tensor.dtype for tensor in self.tensors if tensor.is_floating_point()}:
            chosen = [tensor for tensor in self.tensors if tensor.dtype == dtype]
            torch.ops.aten._foreach_add_.Tensor(chosen, veil.to(dtype))  # by name: the overload for numbers would sync

    def _allocate(self, output: Tensor, extent: Extent) -> Tensor:
        return output.new_empty((extent.place(self.everything).stop, *output.shape[1:]))


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy many tensors in one launch for each dtype. Queued on the current stream; no sync."""
    for dtype in {source.dtype for source in sources}:
        chosen = [at for at, source in enumerate(sources) if source.dtype == dtype]
        torch._foreach_copy_([targets[at] for at in chosen], [sources[at] for at in chosen])
