"""Consensus of ranks that share a module, during captures."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, TypeVar

from varlen_graphs.capture.memory import is_out_of_memory
from varlen_graphs.errors import CaptureError, VarlenGraphsError

Value = TypeVar("Value")

FailureKind = Literal["memory", "other", "declaration"]
"""Kind of failure: short memory, the declaration (the same for all budgets), or something else."""


class Failure(NamedTuple):
    """An error, and what follows from it."""

    error: Exception
    kind: FailureKind

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Classify an error of a capture."""
        if isinstance(error, VarlenGraphsError) and not isinstance(error, CaptureError):
            return cls(error, "declaration")
        return cls(error, "memory" if is_out_of_memory(error) else "other")


class Outcome:
    """An attempt that all ranks make: `failure` is set if it failed on any of them."""

    def __init__(self) -> None:
        self.failure: Failure | None = None

    def take(self) -> Failure | None:
        """Return the failure and forget it, because an error keeps all that the frames of its traceback hold."""
        failure, self.failure = self.failure, None
        return failure

    def check(self) -> None:
        """Raise the error, if the attempt failed."""
        failure = self.take()
        try:
            if failure is not None:
                raise failure.error
        finally:
            del failure  # or the error would refer to itself


class Consensus:
    """The consensus of one process with itself. `TensorParallelEncoder` replaces it by the consensus of its ranks.

    Attributes:
        alone: True for one process.
    """

    alone = True

    @contextmanager
    def collective_try(self) -> Iterator[Outcome]:
        """Run the block on every rank. An error in it ends the block, on all ranks with the same kind of failure."""
        outcome = Outcome()
        try:
            yield outcome
        except Exception as error:
            outcome.failure = Failure.of(error)

    def must(self, run: Callable[[], Value]) -> Value:
        """Run a function on every rank. An error on any rank raises on all."""
        with self.collective_try() as outcome:
            value = run()
        outcome.check()
        return value

    def dry_run(self) -> AbstractContextManager[Any]:
        """Return a context in which collectives run without other ranks, so that nobody waits for a rank that fails."""
        return nullcontext()

    def same(self, value: Value) -> Value:
        """Return the value of the first rank, on all ranks."""
        return value
