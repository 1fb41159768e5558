"""From the static outputs of replays to tensors of the caller's own."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from varlen_graphs.layout.span import Span
from varlen_graphs.spec.entries import Extent


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
        veils: Mapping[torch.dtype, Tensor] | None = None,
    ) -> None:
        """Copy what a run gave to its places, in one launch for each dtype. Queued on the current stream; no sync.

        Args:
            outputs: The outputs of the run, padding included.
            extents: What each of them is.
            spans: Where its rows and items are in the call, and where in the run.
            veils: A scalar to add to floating outputs, for a run of the whole call; see `copies`.
        """
        if spans[0][0] == self.everything:
            here = spans[0][1]
            self.tensors = copies([extent.part(out, here) for out, extent in zip(outputs, extents, strict=True)], veils)
            return
        self.tensors = self.tensors or [self._allocate(*pair) for pair in zip(outputs, extents, strict=True)]
        targets, sources = [], []
        for there, here in spans:
            targets += [extent.part(own, there) for own, extent in zip(self.tensors, extents, strict=True)]
            sources += [extent.part(out, here) for out, extent in zip(outputs, extents, strict=True)]
        for at in _by_dtype(sources):
            torch._foreach_copy_([targets[i] for i in at], [sources[i] for i in at])

    def _allocate(self, output: Tensor, extent: Extent) -> Tensor:
        make = output.new_zeros if extent.gaps else output.new_empty
        return make(extent.resize(output.shape, extent.size(self.everything)))


def copies(tensors: Sequence[Tensor], veils: Mapping[torch.dtype, Tensor] | None = None) -> list[Tensor]:
    """New contiguous tensors of the same values, in one launch for each dtype. Queued on the current stream; no sync.

    Zeros keep their signs; a NaN may become another NaN.

    Args:
        tensors: What to copy.
        veils: A scalar to add to floating ones, by dtype; float32 stands for all that are not there.
    """
    made: list[Tensor] = [*tensors]
    for at in _by_dtype(tensors):
        some = [tensors[i] for i in at]
        floating, dtype = some[0].is_floating_point(), some[0].dtype
        if veils is not None and floating:
            veil = veils[dtype] if dtype in veils else veils[torch.float32]
            if dtype.itemsize == 1:  # torch adds no float8
                new: Sequence[Tensor] = [(x.float() + veil).to(dtype).contiguous() for x in some]
            else:  # by name: the overload for numbers would sync
                new = torch.ops.aten._foreach_add.Tensor([x.contiguous() for x in some], veil.to(dtype))
        elif floating and dtype.itemsize > 1 and all(tensor.is_contiguous() for tensor in some):
            new = torch._foreach_mul(some, 1)  # allocates and copies in one call, which to clone each does not
        else:
            new = [tensor.clone(memory_format=torch.contiguous_format) for tensor in some]
        for i, tensor in zip(at, new, strict=True):
            made[i] = tensor
    return made


def _by_dtype(tensors: Sequence[Tensor]) -> list[Sequence[int]]:
    """The indices of tensors of each dtype."""
    dtypes = [tensor.dtype for tensor in tensors]
    if dtypes.count(dtypes[0]) == len(dtypes):
        return [range(len(dtypes))]
    return [[i for i, own in enumerate(dtypes) if own == dtype] for dtype in dict.fromkeys(dtypes)]
