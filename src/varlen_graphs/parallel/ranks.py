"""What ranks tell each other."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from varlen_graphs.capture.pool import on_device
from varlen_graphs.errors import RankError, SpecError
from varlen_graphs.layout.items import Layout
from varlen_graphs.parallel.block import Block
from varlen_graphs.spec.outputs import Parts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Kept = TypeVar("Kept")
Sent = TypeVar("Sent")


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
        self._arriving: deque[tuple[list[int], Tensor, torch.cuda.Event | None]] = deque()
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
        self, own: Sequence[Tensor] | None, parts: Sequence[Layout | None], form: Parts, device: torch.device
    ) -> list[list[Tensor]]:
        """The outputs of all ranks. Queued on the current stream; NCCL does not sync.

        Each rank that has some sends them as one block of bytes, and receives those of the others: no more than that
        crosses a link, however uneven the parts are, and nothing is sent to tell sizes, which follow from the items.

        Args:
            own: The outputs of this rank; `None` where it has no items, or has failed. Then it takes part all the
                same, so that ranks stay in step: others get NaN in their place, and `tell` tells them.
            parts: The items of each rank, `None` where it has none.
            form: What outputs are like.
            device: Where they are.

        Returns:
            One list a rank; an empty one where it has no items.

        Raises:
            RankError: A rank takes part no more, as far as the host sees it by now.
        """
        with on_device(device):
            blocks = {rank: Block(form, part, device) for rank, part in enumerate(parts) if part is not None}
            if self.own in blocks:
                blocks[self.own].fill(own)
            with _together():
                sending = [
                    dist.broadcast(block.memory, group=self._group, group_src=rank, async_op=True)
                    for rank, block in blocks.items()
                ]
                for work in sending:
                    work.wait()
            if own is not None or self.own not in blocks:  # who has failed raises that
                failed = torch.cat([block.failed for block in blocks.values()]).to("cpu", non_blocking=True)
                self._arriving.append(([*blocks], failed, _recorded(device)))
        return [blocks[rank].tensors if rank in blocks else [] for rank in range(self.count)]

    def abort(self) -> None:
        """End all collectives of the group, also those that hang on the GPU. It is of no use any more.

        Of NCCL this waits until no graph is left that holds some.
        """
        group = self._group or dist.group.WORLD
        if group is not None:
            group.abort()

    def tell(self, wait: bool = False) -> None:
        """Raise that other ranks have failed in a call, as far as it is known by now: of several calls the first.

        Args:
            wait: Whether to wait until it is known of all calls.

        Raises:
            RankError: Some have.
        """
        while self._arriving:
            ranks, failed, ready = self._arriving[0]
            if ready is not None and wait:
                ready.synchronize()
            if ready is not None and not ready.query():
                return
            self._arriving.popleft()
            others = [rank for rank, one in zip(ranks, failed.tolist(), strict=True) if one]
            if others:
                raise RankError(
                    f"ranks {others} raised an error in this call or an earlier one, see their own output; what they "
                    "were to encode is NaN"
                )


def _recorded(device: torch.device) -> torch.cuda.Event | None:
    """What tells when the device has done what is queued; `None` where nothing is ever queued."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


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
