"""Communication between ranks."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from varlen_graphs.capture.pool import on_device
from varlen_graphs.errors import RankError, SpecError
from varlen_graphs.layouts.items import Layout
from varlen_graphs.outputs.parts import Parts
from varlen_graphs.parallel.block import Block

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Local = TypeVar("Local")
Sent = TypeVar("Sent")


class Ranks:
    """The processes of a group; `None` is the default group."""

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

    def exchange(self, device: torch.device, compute: Callable[[], tuple[Local, Sent]]) -> tuple[Local, list[Sent]]:
        """Compute a local value and a small one to send, on each rank; return the local one and those of all ranks.

        Synchronizes with the host. An error of this rank propagates, that of another rank is a `RankError`.
        """
        local: Any = None
        sent: Any = None
        failure: Exception | None = None
        try:
            local, sent = compute()
        except Exception as error:  # other ranks must not wait for a rank that has failed
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
        return local, [sent for sent, _ in told]

    def gather(
        self, own: Sequence[Tensor] | None, parts: Sequence[Layout | None], form: Parts, device: torch.device
    ) -> list[list[Tensor]]:
        """Gather the outputs of all ranks: one list per rank, empty if it has no items. NCCL queues, without a sync.

        Each rank broadcasts its outputs as one block of bytes, so a link carries no more than the outputs however
        uneven the parts are. `own` is `None` if this rank has no items or failed. A rank that failed takes part too, to
        keep ranks in step: others receive NaN, and `tell` raises there.
        """
        with on_device(device):
            blocks = {rank: Block(form, part, device) for rank, part in enumerate(parts) if part is not None}
            if self.own in blocks:
                blocks[self.own].fill(own)
            with _together():
                send = partial(dist.broadcast, group=self._group, async_op=True)
                for work in [send(block.memory, group_src=rank) for rank, block in blocks.items()]:
                    work.wait()
            if own is not None or self.own not in blocks:  # a failed rank raises its own error
                failed = torch.cat([block.failed for block in blocks.values()]).to("cpu", non_blocking=True)
                self._arriving.append(([*blocks], failed, _recorded(device)))
        return [blocks[rank].tensors if rank in blocks else [] for rank in range(self.count)]

    def abort(self) -> None:
        """Abort all collectives of the group, for good; with NCCL this waits until no graph holds any."""
        group = self._group or dist.group.WORLD
        if group is not None:
            group.abort()

    def tell(self, wait: bool = False) -> None:
        """Raise `RankError` if other ranks failed in a call known to have ended by now, or with `wait` in any call."""
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
                    f"ranks {others} raised an error in this call or an earlier one, see their own logs; the outputs "
                    "of their items are NaN"
                )


def _recorded(device: torch.device) -> torch.cuda.Event | None:
    """Record an event on the current stream; `None` if the device has no streams."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


@contextmanager
def _together() -> Iterator[None]:
    """Turn errors of collectives inside the block into `RankError`."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            "a rank of the group did not take part in a call: it died, hangs, raised an error, or was called in "
            "another order; see its own logs. This group cannot be used any more: end the process"
        ) from error
