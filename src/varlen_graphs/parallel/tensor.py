"""`TensorParallelEncoder`: one encoder whose weights are sharded over several GPUs."""

import logging
import re
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from varlen_graphs.capture.agreement import Agreement, Failure, FailureKind
from varlen_graphs.capture.collectives import Rehearsal
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import RankError, SpecError, warn
from varlen_graphs.parallel.deadline import Deadline
from varlen_graphs.parallel.kinds import check_same
from varlen_graphs.parallel.ranks import Ranks
from varlen_graphs.watch.sharded import mesh_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor.parallel import ParallelStyle

Value = TypeVar("Value")

LOGGER = logging.getLogger("varlen_graphs")

KINDS: tuple[FailureKind, ...] = ("memory", "other", "declaration")
"""The later ones prevail where ranks fail in several ways."""


def tensor_plan(tower: nn.Module) -> "dict[str, ParallelStyle]":
    """How to shard the tower of a recipe, as a plan for torch's `parallelize_module`.

        parallelize_module(tower, init_device_mesh("cuda", (ranks,)), vg.parallel.tensor_plan(tower))

    Each rank has the attention of some heads, and a part of each MLP; all else is replicated. It is for towers whose
    blocks have one projection for queries, keys and values: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5, Qwen3-Omni, GLM.
    `num_heads` of each attention becomes what a rank has. Load the weights before.

    Raises:
        SpecError: The tower has other blocks. `parallelize_module` raises one where ranks cannot share the heads.
    """
    from varlen_graphs.parallel.styles import plan_of

    return plan_of(tower)


class TensorParallelEncoder:
    """Encodes on all ranks of a group together, each with a shard of the weights; the collectives are in the graphs.

    Shard the module with torch's `parallelize_module` first, then make its encoder, then this. All ranks do each of
    these, make the same calls with the same items in the same order, and get the same whole output.

    What ranks must do alike they agree on while they capture: the same budgets in the same order, those out of use that
    failed on any rank, and the times that the first rank measured, or has from a warm-up file. So all ranks plan each
    call alike, and a call sends nothing but what the module itself sends. A forward that is captured runs without the
    other ranks first: what fails on one rank, such as memory that is not enough, then raises, or puts a budget out of
    use, on all of them.

    A rank may die or hang, raise an error that others do not meet, or be called with something else. Nothing of torch
    looks at collectives in a graph, so on GPUs a thread does while calls are under way: where none ends within
    `deadline`, the group is aborted, which ends what hangs on the GPU. `RankError` then comes from each later call and
    from `check()`; an output that was under way is undefined. On the CPU collectives raise by themselves, at the
    timeout of the group, and the call raises `RankError`. After that a group is of no use any more.

    Args:
        encoder: The encoder of this rank's shard, nothing captured yet. All ranks have the same budgets and options.
        group: The ranks. `None` is the group of the mesh that weights are sharded over.
        deadline: Seconds, on GPUs. Work queued ahead on the stream of a call counts.

    Attributes:
        encoder: As given. Its own calls are those of the group, too, but for the deadline.

    Raises:
        SpecError: There is no process group, or an encoder that has captured, that ranks could not agree on (`verify`,
            `lazy`, `memory`), or whose compiler may reorder collectives (`compile`).
        RankError: Another rank has other budgets, or raised an error.
    """

    def __init__(self, encoder: GraphedEncoder, group: "ProcessGroup | None" = None, *, deadline: float = 60.0) -> None:
        if not 0 < deadline <= threading.TIMEOUT_MAX:
            raise SpecError(f"deadline={deadline}: expected finite seconds above 0")
        if not isinstance(encoder, GraphedEncoder):
            raise SpecError(f"a {type(encoder).__name__} came as the encoder: expected a GraphedEncoder of the module")
        if len(encoder._captured):
            raise SpecError("the encoder has captured already, by itself: expected a new one, or encoder.release()")
        if encoder._calls.checks is not None:
            raise SpecError(
                "verify takes budgets out of use on one rank alone: expected an encoder without it; call "
                "encoder.verify(calls) on all ranks instead"
            )
        if encoder._forward.compiled is not None:
            raise SpecError("compile=True may put collectives in another order: expected an encoder without it")
        if encoder._captured.lazy:
            raise SpecError("lazy=True captures when one rank alone has time: expected an encoder without it")
        if encoder._captured.limit is not None:
            raise SpecError(
                "memory= takes budgets out of use by what one rank alone holds: expected an encoder without it; choose "
                "budgets that fit, for example by Ladder.auto(memory, bytes_per_row)"
            )
        mesh = mesh_of(encoder.module)
        self.encoder = encoder
        self._ranks = Ranks(mesh.get_group() if group is None and mesh is not None else group)
        if mesh is None and self._ranks.count > 1:
            warn(
                f"no weight of {type(encoder.module).__name__} is sharded, so every rank does all of the work unless "
                "the module divides it by itself: call torch's parallelize_module before you make the encoder"
            )
        self._lost: str | None = None
        device = encoder._forward.device or torch.device("cpu")
        self._deadline: Deadline | None = None
        if device.type == "cuda":
            self._deadline = Deadline(deadline, device, _method(self._give_up))
            weakref.finalize(self, self._deadline.close)
        self._seconds = deadline
        agreement = _Ranks(self._ranks, device)
        _, budgets = self._ranks.exchange(device, lambda: (None, tuple(encoder.budgets)))
        check_same(budgets)
        costs, encoder._in_use.known = agreement.same((encoder.costs, encoder._in_use.known))
        encoder._in_use.learn(costs)
        encoder._captured.agreement = agreement

    @property
    def module(self) -> nn.Module:
        """The module of the encoder."""
        return self.encoder.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode the items of one call, the same on all ranks.

        Raises:
            RankError: Another rank takes part no more, in this call or an earlier one, or failed to capture.
            InputError, LayoutError, BudgetError, CaptureError, StaleGraphError: As for `GraphedEncoder`.
        """
        output = self._together(lambda: self.encoder(*args, **kwargs))
        if self._deadline is not None:
            self._deadline.watch()
        return output

    def capture(self, **statics: Any) -> "TensorParallelEncoder":
        """Capture the graphs now, on all ranks, for calls with these static arguments: see `GraphedEncoder.capture`."""
        self._together(lambda: self.encoder.capture(**statics))
        return self

    def check(self) -> None:
        """Wait for all calls, and raise what went wrong: the deadline bounds how long.

        Raises:
            RankError: A rank takes part no more.
            LayoutError, StaleGraphError: As for `GraphedEncoder.check`.
        """
        self._together(self.encoder.check)
        self._tell()

    def _together(self, run: Callable[[], Value]) -> Value:
        """Run something that has collectives, whose errors say that another rank is lost."""
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

    def _give_up(self) -> None:
        """Abort the group, because calls do not end. In a thread."""
        self._lost = f"no call ended for {self._seconds:g} s, so the group was aborted: {_LOST}"
        LOGGER.error("%s", self._lost)
        aborting = threading.Thread(target=self._ranks.abort, name="varlen_graphs abort", daemon=True)
        aborting.start()  # it raises a flag at once, at which collectives end, and then waits for the end of all graphs
        with suppress(Exception):  # of the device: whoever uses it next is told
            self.encoder.release()

    def __repr__(self) -> str:
        return f"TensorParallelEncoder({self.encoder!r}, rank {self._ranks.own} of {self._ranks.count})"


_LOST = (
    "a rank of the group has died, hangs, raised an error, or was called with something else; see its own output. This "
    "group is of no use any more: end the process"
)


class _Ranks(Agreement):
    """The agreement of the ranks of a group. Synchronizes with the host."""

    alone = False

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device

    def attempt(self, run: Callable[[], object]) -> Failure | None:
        """Run something on every rank; what fails on another rank is a `RankError` that quotes it."""
        failure = super().attempt(run)
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

    def rehearse(self, run: Callable[[], Value]) -> Value:
        """Run without the other ranks."""
        with Rehearsal():  # type: ignore[no-untyped-call]  # torch's own
            return run()

    def same(self, value: Value) -> Value:
        """The value of the first rank: small, and no tensors."""
        told: list[Value]
        _, told = self._ranks.exchange(self._device, lambda: (None, value))
        return told[0]


def _is_of_group(error: RuntimeError) -> bool:
    """Whether a collective raised this."""
    return isinstance(error, torch.distributed.DistError) or _GLOO.match(str(error)) is not None


_GLOO = re.compile(r"\[(enforce fail at )?\S*gloo/\S+:\d+\] |Application timeout caused pair closure$")
"""What errors of gloo say, which are of no class of their own: most begin with where in its source they are raised."""


def _method(bound: Any) -> Callable[[], None]:
    """A bound method that does not keep its object."""
    method = weakref.WeakMethod(bound)

    def call() -> None:
        if (found := method()) is not None:
            found()

    return call
