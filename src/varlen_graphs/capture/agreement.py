"""Agreement of the ranks that share a module on each step of a capture."""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar

from varlen_graphs.capture.memory import is_out_of_memory
from varlen_graphs.errors import CaptureError, VarlenGraphsError

Value = TypeVar("Value")

FailureKind = Literal["memory", "other", "declaration"]
"""Kind of failure: out of memory, a wrong declaration, which affects all budgets alike, or another error."""


class Failure(NamedTuple):
    """An error and its kind."""

    error: Exception
    kind: FailureKind

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Classify an error."""
        if isinstance(error, VarlenGraphsError) and not isinstance(error, CaptureError):
            return cls(error, "declaration")
        return cls(error, "memory" if is_out_of_memory(error) else "other")


class Agreement:
    """Agreement of a single process, which is trivial. `TensorParallelEncoder` replaces it with that of its ranks.

    Attributes:
        alone: True for a single process.
    """

    alone = True

    def attempt(self, run: Callable[[], object]) -> Failure | None:
        """Run a function on every rank; if it fails on any, return a failure of the same kind on all."""
        try:
            run()
        except Exception as error:
            return Failure.of(error)
        return None

    def must(self, run: Callable[[], Value]) -> Value:
        """Run a function on every rank, and return its result; if it fails on any rank, raise on all."""
        results: list[Value] = []
        failure = self.attempt(lambda: results.append(run()))
        try:
            if failure is not None:
                raise failure.error
        finally:
            del failure  # breaks the cycle from the error to this frame, which would keep tensors alive
        return results[0]

    def rehearse(self, run: Callable[[], Value]) -> Value:
        """Run a function that calls collectives without the other ranks, so that no rank waits for one that fails."""
        return run()

    def same(self, value: Value) -> Value:
        """Return the value of the first rank on all ranks."""
        return value
