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

    def take(
        self,
        outputs: Sequence[Tensor],
        extents: Sequence[Extent],
        spans: Sequence[tuple[Span, Span]],
        veil: Tensor | None = None,
    ) -> None:
        """Copy what a run gave to its places, in one launch for each dtype. Queued on the current stream; no sync.

        Args:
            outputs: The outputs of the run, padding included.
            extents: What each of them is.
            spans: Where its rows and items are in the call, and where in the run.
            veil: A scalar to add to floating outputs, for a run of the whole call.
        """
        if spans[0][0] == self.everything:
            self.tensors = copies(
                [out[extent.place(spans[0][1])] for out, extent in zip(outputs, extents, strict=True)], veil
            )
            return
        self.tensors = self.tensors or [self._allocate(*pair) for pair in zip(outputs, extents, strict=True)]
        targets, sources = [], []
        for there, here in spans:
            targets += [own[extent.place(there)] for own, extent in zip(self.tensors, extents, strict=True)]
            sources += [out[extent.place(here)] for out, extent in zip(outputs, extents, strict=True)]
        for at in _by_dtype(sources):
            torch._foreach_copy_([targets[i] for i in at], [sources[i] for i in at])

    def _allocate(self, output: Tensor, extent: Extent) -> Tensor:
        return output.new_empty((extent.place(self.everything).stop, *output.shape[1:]))


def copies(tensors: Sequence[Tensor], veil: Tensor | None = None) -> list[Tensor]:
    """New contiguous tensors of the same values, in one launch for each dtype. Queued on the current stream; no sync.

    Zeros keep their signs; a NaN may become another NaN.

    Args:
        tensors: What to copy.
        veil: A scalar to add to floating ones.
    """
    made: list[Tensor] = [*tensors]
    for at in _by_dtype(tensors):
        some = [tensors[i] for i in at]
        floating, dtype = some[0].is_floating_point(), some[0].dtype
        if dtype.itemsize == 1 and floating and veil is not None:
            new: Sequence[Tensor] = [(x.float() + veil).to(dtype).contiguous() for x in some]  # torch adds no float8
        elif veil is not None and floating:
            # By name: the overload for numbers would sync.
            new = torch.ops.aten._foreach_add.Tensor([x.contiguous() for x in some], veil.to(dtype))
        elif floating and dtype.itemsize > 1 and all(tensor.is_contiguous() for tensor in some):
            new = torch._foreach_mul(some, 1)  # allocates and copies in one call, which to clone each does not
        else:
            new = [tensor.clone(memory_format=torch.contiguous_format) for tensor in some]
        for i, tensor in zip(at, new, strict=True):
            made[i] = tensor
    return made


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The indices of tensors of each dtype."""
    indices: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        indices.setdefault(tensor.dtype, []).append(index)
    return list(indices.values())
