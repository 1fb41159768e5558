"""What ranks that share a module do alike while they capture."""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar

from varlen_graphs.capture.memory import is_out_of_memory
from varlen_graphs.errors import CaptureError, VarlenGraphsError

Value = TypeVar("Value")

Kind = Literal["memory", "other", "declaration"]
"""What went wrong: memory is short, something else, or the declaration, which is the same for all budgets."""


class Failure(NamedTuple):
    """An error, and what follows from it."""

    error: Exception
    kind: Kind

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """What an error means for a capture."""
        if isinstance(error, VarlenGraphsError) and not isinstance(error, CaptureError):
            return cls(error, "declaration")
        return cls(error, "memory" if is_out_of_memory(error) else "other")


class Agreement:
    """One process, which has to agree with nobody. `TensorParallelEncoder` puts that of its ranks in the place.

    Attributes:
        alone: Whether it is one process.
    """

    alone = True

    def attempt(self, run: Callable[[], object]) -> Failure | None:
        """Run something on every rank: what went wrong, of the same kind on all ranks if it did on any."""
        try:
            run()
        except Exception as error:
            return Failure.of(error)
        return None

    def must(self, run: Callable[[], Value]) -> Value:
        """Run something on every rank. What goes wrong on any raises on all."""
        came: list[Value] = []
        failure = self.attempt(lambda: came.append(run()))
        try:
            if failure is not None:
                raise failure.error
        finally:
            del failure  # or the error would refer to itself, and keep what its frames hold
        return came[0]

    def rehearse(self, run: Callable[[], Value]) -> Value:
        """Run what has collectives, without other ranks, so that nobody waits for a rank where it fails."""
        return run()

    def same(self, value: Value) -> Value:
        """The value of the first rank, on all."""
        return value
