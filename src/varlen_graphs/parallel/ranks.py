"""What ranks tell each other."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from varlen_graphs.capture.pool import on_device
from varlen_graphs.errors import RankError, SpecError
from varlen_graphs.layout import Layout
from varlen_graphs.outputs import Parts
from varlen_graphs.packing import Span

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Kept = TypeVar("Kept")
Sent = TypeVar("Sent")

ALIGNMENT = 16
"""Bytes. Every tensor of a block begins at a multiple of it, as its dtype may ask."""


class Ranks:
    """The processes that share a call.

    Args:
        group: Their group; `None` is the default one.

    Attributes:
        own: The rank of this process.
        count: How many there are.

    Raises:
        SpecError: There is no group, or this process is not in it.
    """

    def __init__(self, group: "ProcessGroup | None") -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise SpecError(
                "there is no process group: launch with torchrun, and call torch.distributed.init_process_group() first"
            )
        self._group = group
        self.own, self.count = dist.get_rank(group), dist.get_world_size(group)
        if self.own < 0:
            raise SpecError(f"process {dist.get_rank()} is not in the group: expected one of its members")

    def exchange(self, device: torch.device, compute: Callable[[], tuple[Kept, Sent]]) -> tuple[Kept, list[Sent]]:
        """Compute something on each rank, and tell all others. Synchronizes with the host.

        Args:
            device: Where the module is.
            compute: Gives what is kept, and what is sent: small, and no tensors.

        Returns:
            What this rank keeps, and what each rank sent.

        Raises:
            RankError: Another rank raised an error, which is quoted. What this rank raised itself goes on as it is.
        """
        kept: Any = None
        sent: Any = None
        failure: Exception | None = None
        try:
            kept, sent = compute()
        except Exception as error:  # others must not wait for a rank that has failed
            failure = error
        told: list[Any] = [None] * self.count
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        with on_device(device), _together():
            dist.all_gather_object(told, (sent, message), group=self._group)
        if failure is not None:
            raise failure
        for rank, (_, said) in enumerate(told):
            if said is not None:
                raise RankError(f"rank {rank} raised an error, so no rank has a result: {said}")
        return kept, [sent for sent, _ in told]

    def gather(
        self, own: Sequence[Tensor], parts: Sequence[Layout | None], form: Parts, device: torch.device
    ) -> list[list[Tensor]]:
        """The outputs of all ranks. Queued on the current stream; NCCL does not sync.

        Each rank that has some sends them as one block of bytes, and receives those of the others: no more than that
        crosses a link, however uneven the parts are, and nothing is sent to tell sizes, which follow from the items.

        Args:
            own: The outputs of this rank, if it has items.
            parts: The items of each rank, `None` where it has none.
            form: What outputs are like: their tensors give shapes but for the entries, and dtypes.
            device: Where they are.

        Returns:
            One list a rank; an empty one where it has no items.
        """
        gathered: list[list[Tensor]] = []
        sending = []
        with on_device(device), _together():
            for rank, part in enumerate(parts):
                if part is None:
                    gathered.append([])
                    continue
                block, tensors = _block(form, part, device)
                if rank == self.own:
                    torch._foreach_copy_(tensors, [*own])
                sending.append(dist.broadcast(block, group=self._group, group_src=rank, async_op=True))
                gathered.append(tensors)
            for work in sending:
                work.wait()
        return gathered


def _block(form: Parts, part: Layout, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Memory for the outputs of some items, as bytes and as the tensors it consists of."""
    span = Span.of(part)
    shapes = [e.resize(like.shape, e.size(span)) for like, e in zip(form.tensors, form.extents, strict=True)]
    sizes = [prod(shape) * like.dtype.itemsize for shape, like in zip(shapes, form.tensors, strict=True)]
    block = torch.empty(sum(map(_aligned, sizes)), dtype=torch.uint8, device=device)
    tensors, start = [], 0
    for like, shape, size in zip(form.tensors, shapes, sizes, strict=True):
        tensors.append(block[start : start + size].view(like.dtype).view(shape))
        start += _aligned(size)
    return block, tensors


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@contextmanager
def _together() -> Iterator[None]:
    """What all ranks take part in."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            "a rank of the group took no part in a call: it has died, hangs, raised an error, or was called in another "
            "order; see its own output. This group is of no use any more: end the process"
        ) from error
