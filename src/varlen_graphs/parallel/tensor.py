"""`TensorParallelEncoder`: one encoder whose weights are sharded over several GPUs."""

import logging
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from varlen_graphs.capture.collectives import DryRun
from varlen_graphs.capture.consensus import Consensus, Failure, FailureKind, Outcome
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import RankError, SpecError, warn
from varlen_graphs.parallel.deadline import Deadline
from varlen_graphs.parallel.kinds import check_same
from varlen_graphs.parallel.ranks import Ranks
from varlen_graphs.torch_dispatch.sharded import mesh_of
from varlen_graphs.verify.in_service import InService

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor.parallel import ParallelStyle

Value = TypeVar("Value")

LOGGER = logging.getLogger("varlen_graphs")

KINDS: tuple[FailureKind, ...] = ("memory", "other", "declaration")
"""Kinds of failure, in ascending order of precedence if ranks fail in several ways."""


def tensor_plan(tower: nn.Module) -> "dict[str, ParallelStyle]":
    """Return a plan for torch's `parallelize_module` that shards the tower of a recipe.

        parallelize_module(tower, init_device_mesh("cuda", (ranks,)), vg.parallel.tensor_plan(tower))

    Each rank has the attention of some heads and a part of each MLP; everything else is replicated. The plan is for
    towers whose blocks have a fused projection of queries, keys and values: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5,
    Qwen3-Omni, GLM. It sets `num_heads` of each attention to the number of heads of a rank. Load weights before.

    Args:
        tower: The tower, not yet sharded.

    Raises:
        SpecError: The tower has other blocks. `parallelize_module` raises it if the number of ranks does not divide the
            number of heads.
    """
    from varlen_graphs.parallel.styles import plan_of

    return plan_of(tower)


class TensorParallelEncoder:
    """Encodes on all ranks of a group together, each with a shard of the weights; the collectives are in the graphs.

    First shard the module with torch's `parallelize_module`, then create its encoder, then this object. All ranks do
    each of these, make the same calls with the same items in the same order, and return the same whole output.

    Ranks agree during the capture: they capture the same budgets in the same order, disable every budget that failed on
    any rank, and use the costs that the first rank measured or read from a warm-up file. So all ranks plan each call
    the same way, and a call sends nothing but what the module itself sends. Before each capture the forward runs
    without the other ranks: a failure on one rank, such as a lack of memory, then raises or disables a budget on all
    ranks.

    A rank may die or hang, raise an error that others do not meet, or make a different call. torch does not watch
    collectives inside a graph, so on GPUs a thread does while calls are pending: if none ends within `deadline`, the
    group is aborted, which ends the work that hangs on the GPU. Each later call and `check()` then raise `RankError`;
    the outputs of pending calls are undefined. On the CPU collectives raise at the timeout of the group, and the call
    raises `RankError`. The group cannot be used afterwards.

    Args:
        encoder: Encoder of this rank's shard, without captured graphs, with the same budgets and options on all ranks.
        group: Process group; `None` is the group of the mesh that the weights are sharded over.
        deadline: Longest time without the end of a call, in seconds, on GPUs. Includes work queued earlier on the
            stream of a call.

    Attributes:
        encoder: As given. Calling it directly is a call of the group as well, without the deadline.

    Raises:
        SpecError: There is no process group, `deadline` is not positive and finite, `encoder` is not a `GraphedEncoder`
            or has captured graphs, or it has an option that ranks could not agree on (`verify`, `memory`,
            `vg.options.Capture(lazy=True)`) or that may reorder collectives (`vg.options.Capture(compile=True)`).
        RankError: Another rank has other budgets, or raised an error.
    """

    def __init__(self, encoder: GraphedEncoder, group: "ProcessGroup | None" = None, *, deadline: float = 60.0) -> None:
        if not 0 < deadline <= threading.TIMEOUT_MAX:
            raise SpecError(f"deadline={deadline}: expected finite seconds above 0")
        if not isinstance(encoder, GraphedEncoder):
            raise SpecError(f"encoder is a {type(encoder).__name__}: expected a GraphedEncoder of the module")
        if len(encoder.executor.store):
            raise SpecError(
                "the encoder has captured graphs without the other ranks: expected a new encoder; or call "
                "encoder.release() first"
            )
        if isinstance(in_service := encoder.executor.verification, InService) and in_service.calls:
            raise SpecError(
                "verify= disables budgets on one rank alone: expected an encoder without it; call "
                "encoder.verify(calls) on all ranks instead"
            )
        if encoder.executor.forward.compiled is not None:
            raise SpecError(
                "capture=vg.options.Capture(compile=True) may reorder collectives: expected an encoder without it"
            )
        if encoder.executor.store.lazy or encoder.executor.exact is not None:
            raise SpecError(
                "Capture(lazy=True) and Capture(exact=N) capture when one rank alone has time: expected an encoder "
                "without them"
            )
        if encoder.executor.store.limit is not None:
            raise SpecError(
                "memory= disables budgets by the memory of one rank alone: expected an encoder without it; choose "
                "budgets that fit, for example Ladder.auto(memory, bytes_per_row)"
            )
        mesh = mesh_of(encoder.module)
        self.encoder = encoder
        self._ranks = Ranks(mesh.get_group() if group is None and mesh is not None else group)
        if mesh is None and self._ranks.count > 1:
            warn(
                f"no weight of {type(encoder.module).__name__} is sharded, so every rank does all of the work unless "
                "the module divides it itself: call torch's parallelize_module before you create the encoder"
            )
        self._lost: str | None = None
        device = encoder.executor.forward.device or torch.device("cpu")
        self._deadline: Deadline | None = None
        if device.type == "cuda":
            self._deadline = Deadline(deadline, device, _method(self.give_up))
            weakref.finalize(self, self._deadline.close)
        self._seconds = deadline
        consensus = _RankConsensus(self._ranks, device)
        _, budgets = self._ranks.exchange(device, lambda: (None, tuple(encoder.budgets)))
        check_same(budgets)
        store = encoder.executor.store
        encoder.costs, store.budgets.known = consensus.same((encoder.costs, store.budgets.known))
        store.consensus = consensus

    @property
    def module(self) -> nn.Module:
        """The module of the encoder."""
        return self.encoder.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode the items of one call, the same on all ranks.

        Raises:
            RankError: Another rank no longer takes part, since this call or an earlier one, or failed to capture.
            InputError, LayoutError, BudgetError, CaptureError, StaleGraphError: As for `GraphedEncoder`.
        """
        output = self._together(lambda: self.encoder(*args, **kwargs))
        if self._deadline is not None:
            self._deadline.watch()
        return output

    def capture(self, **static_args: Any) -> "TensorParallelEncoder":
        """Capture the graphs now, on all ranks, for calls with these static arguments; see `GraphedEncoder.capture`."""
        self._together(lambda: self.encoder.capture(**static_args))
        return self

    def check(self) -> None:
        """Wait for all calls, until the deadline at the latest, and raise if one failed.

        Raises:
            RankError: A rank no longer takes part.
            LayoutError, StaleGraphError: As for `GraphedEncoder.check`.
        """
        self._together(self.encoder.check)
        self._tell()

    def _together(self, run: Callable[[], Value]) -> Value:
        """Run a function that has collectives; an error of a collective means that another rank is lost."""
        self._tell()
        try:
            return run()
        except RankError as error:
            if error.__cause__ is not None:  # the group is lost, and not only this capture
                self._lost = str(error)
            raise
        except RuntimeError as error:
            if not _is_of_group(error):
                raise
            self._lost = _LOST
            raise RankError(self._lost) from error

    def _tell(self) -> None:
        if self._lost is not None:
            raise RankError(self._lost)

    def give_up(self) -> None:
        """Abort the group and free the graphs. The thread of the deadline calls this when calls do not end."""
        self._lost = f"no call ended for {self._seconds:g} s, so the group was aborted: {_LOST}"
        LOGGER.error("%s", self._lost)
        aborting = threading.Thread(target=self._ranks.abort, name="varlen_graphs abort", daemon=True)
        aborting.start()  # sets a flag at once, which ends collectives, and then waits until all graphs are freed
        with suppress(Exception):  # an error of the device, which its next use raises
            self.encoder.release()

    def __repr__(self) -> str:
        return f"TensorParallelEncoder({self.encoder!r}, rank {self._ranks.own} of {self._ranks.count})"


_LOST = (
    "a rank of the group died, hangs, raised an error, or made a different call; see its own logs. This group cannot "
    "be used any more: end the process"
)


class _RankConsensus(Consensus):
    """Consensus between the ranks of a group. Synchronizes with the host."""

    alone = False

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device

    @contextmanager
    def collective_try(self) -> Iterator[Outcome]:
        """Run the block on every rank; a failure on another rank is a `RankError` that quotes it."""
        with super().collective_try() as outcome:
            yield outcome
        outcome.failure = self._agree(outcome.take())

    def _agree(self, failure: Failure | None) -> Failure | None:
        """Return the failure of this rank, of the worst kind on any rank, or that of another rank."""
        told: list[tuple[FailureKind, str] | None]
        mine = None if failure is None else (failure.kind, f"{type(failure.error).__name__}: {failure.error}")
        _, told = self._ranks.exchange(self._device, lambda: (None, mine))
        failed = {rank: said for rank, said in enumerate(told) if said is not None}
        if not failed:
            return None
        kind = max((kind for kind, _ in failed.values()), key=KINDS.index)
        if failure is not None:
            return Failure(failure.error, kind)
        rank, (_, message) = next(iter(failed.items()))
        return Failure(RankError(f"rank {rank} raised an error: {message}"), kind)

    def dry_run(self) -> AbstractContextManager[Any]:
        """Run collectives without the other ranks."""
        return DryRun()  # type: ignore[no-untyped-call]  # torch's own

    def same(self, value: Value) -> Value:
        """Return the value of the first rank, which is small and has no tensors."""
        told: list[Value]
        _, told = self._ranks.exchange(self._device, lambda: (None, value))
        return told[0]


def _is_of_group(error: RuntimeError) -> bool:
    """Return True if a collective raised this error."""
    return isinstance(error, torch.distributed.DistError) or _GLOO.match(str(error)) is not None


_GLOO = re.compile(r"\[(enforce fail at )?\S*gloo/\S+:\d+\] |Application timeout caused pair closure$")
"""Messages of gloo's errors, which have no class of their own: most begin with a place in its source."""


def _method(bound: Any) -> Callable[[], None]:
    """Return a function that calls a bound method without keeping its object alive."""
    method = weakref.WeakMethod(bound)

    def call() -> None:
        if (found := method()) is not None:
            found()

    return call
