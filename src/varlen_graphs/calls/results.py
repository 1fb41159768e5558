"""Outputs of a call, copied from the static memory of graphs."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from varlen_graphs.layouts.dtypes import plain
from varlen_graphs.layouts.item_slice import ItemSlice
from varlen_graphs.outputs.entries import Extent


class Collected:
    """The outputs of one call, filled run by run.

    Args:
        everything: Slice of all items of the call.
        views: If True, the outputs of a run of the whole call stay where it wrote them, for the caller to copy.

    Attributes:
        everything: As given.
        tensors: The tensors of the output, active entries only; empty before the first run.
    """

    def __init__(self, everything: ItemSlice, views: bool = False) -> None:
        self.everything = everything
        self._views = views
        self.tensors: list[Tensor] = []

    def take(
        self,
        outputs: Sequence[Tensor],
        extents: Sequence[Extent],
        slices: Sequence[tuple[ItemSlice, ItemSlice]],
        nan_masks: Mapping[torch.dtype, Tensor] | None = None,
    ) -> None:
        """Copy the outputs of a run to their places, one launch for each dtype. Queued on the current stream; no sync.

        Args:
            outputs: The outputs of the run, padding included.
            extents: Their extents.
            slices: Those of the rows and items in the call, and in the run.
            nan_masks: A scalar to add to floating outputs, for a run of the whole call; see `copies`.
        """
        if slices[0][0] == self.everything:
            here, active = slices[0][1], []
            for extent, output in zip(extents, outputs, strict=True):
                active.append(extent.part(output, here))
            self.tensors = active if self._views else copies(active, nan_masks)
            return
        self.tensors = self.tensors or [self._allocate(*pair) for pair in zip(outputs, extents, strict=True)]
        targets, sources = [], []
        for there, here in slices:
            targets += [extent.part(own, there) for own, extent in zip(self.tensors, extents, strict=True)]
            sources += [extent.part(out, here) for out, extent in zip(outputs, extents, strict=True)]
        for at in _by_dtype(sources):
            torch._foreach_copy_([plain(targets[i]) for i in at], [plain(sources[i]) for i in at])

    def _allocate(self, output: Tensor, extent: Extent) -> Tensor:
        made = _empty(plain(output), extent.resize(output.shape, extent.size(self.everything)))
        return (made.zero_() if extent.gaps else made).view(output.dtype)


def copies(tensors: Sequence[Tensor], nan_masks: Mapping[torch.dtype, Tensor] | None = None) -> list[Tensor]:
    """Return copies of tensors in their memory format: one launch per dtype where all are contiguous, else one each.

    Queued on the current stream; no sync.

    Zeros keep their signs; a NaN may become another NaN.

    Args:
        tensors: The tensors.
        nan_masks: Scalars to add to floating tensors, by dtype; float32 stands for dtypes that are missing.
    """
    made: list[Tensor] = [*tensors]
    groups = _by_dtype(tensors)
    for at in groups:
        some = [tensors[i] for i in at] if len(groups) > 1 else made
        floating, dtype = some[0].is_floating_point(), some[0].dtype
        if nan_masks is not None and floating:
            nan_mask = nan_masks[dtype] if dtype in nan_masks else nan_masks[torch.float32]
            if dtype.itemsize == 1:  # torch adds no float8
                new: Sequence[Tensor] = [(x.float() + nan_mask).to(dtype) for x in some]
            else:  # by name: the overload for numbers would sync
                new = torch.ops.aten._foreach_add.Tensor([*some], nan_mask.to(dtype))
        elif floating and dtype.itemsize > 1 and all(map(Tensor.is_contiguous, some)):
            new = torch._foreach_mul(some, 1)  # allocates and copies in one call, which to clone each does not
        else:
            new = [_empty(tensor, tensor.shape).copy_(tensor) for tensor in some]
        if len(groups) == 1:
            return [*new]
        for i, tensor in zip(at, new, strict=True):
            made[i] = tensor
    return made


def _empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of a shape, with its dimensions in memory in the order of another one's, as the module has them.

    Callers may ask for views of outputs. In place of an expanded tensor, whose entries share memory, a contiguous one.
    """
    if like.is_contiguous() or 0 in like.stride():
        return like.new_empty(shape)
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    return torch.empty_permuted(shape, order, dtype=like.dtype, device=like.device)


def _by_dtype(tensors: Sequence[Tensor]) -> list[Sequence[int]]:
    """Return the indices of tensors of each dtype."""
    dtype = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype is not dtype:
            break
    else:  # nearly always
        return [range(len(tensors))]
    indices: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        indices.setdefault(tensor.dtype, []).append(index)
    return [*indices.values()]
