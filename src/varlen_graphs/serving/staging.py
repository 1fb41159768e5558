"""Rows that the caller writes straight into the arena."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from varlen_graphs.errors import InputError


class Stage:
    """What `GraphedEncoder.stage` hands out: rows to write, and the output of them.

    Args:
        rows: Where the caller writes.
        run: Encodes them.
    """

    def __init__(self, rows: Tensor, run: Callable[[], Any]) -> None:
        self._rows = rows
        self._run: Callable[[], Any] | None = run
        self._output: Any = None
        self._computed = False

    @property
    def rows(self) -> Tensor:
        """The rows to write, shaped as in a call, in the module's dtype and on its device; they hold anything at first.

        A padded batch is as long as its longest item, and not contiguous.

        Raises:
            InputError: The output was computed, or the block is over: the memory belongs to other calls now.
        """
        if self._run is None:
            raise InputError("stage.rows was read after stage.output or after the block: write rows before")
        return self._rows

    @property
    def output(self) -> Any:
        """The module's output, the caller's own: computed when it is first read, or at the end of the block.

        Raises:
            InputError: An error ended the block before there was one.
        """
        self.finish()
        if not self._computed:
            raise InputError("there is no stage.output: an error ended the block before it was computed; stage anew")
        return self._output

    def finish(self) -> None:
        """Compute the output, unless that was done or the time for it is over."""
        if self._run is not None:
            run, self._run = self._run, None
            self._output = run()
            self._computed = True

    def close(self) -> None:
        """End the time to write."""
        self._run = None


@contextmanager
def staged(rows: Tensor, run: Callable[[], Any]) -> Iterator[Stage]:
    """A block in which the caller writes `rows`, and at the end of which, at the latest, they are run."""
    stage = Stage(rows, run)
    try:
        yield stage
        stage.finish()
    finally:
        stage.close()
