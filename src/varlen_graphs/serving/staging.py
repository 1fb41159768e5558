"""Stages: rows that the caller writes directly into the arena."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from varlen_graphs.errors import InputError


class Stage:
    """The rows to write and their output, from `GraphedEncoder.stage`.

    Args:
        rows: Memory to write to.
        run: Encodes the rows and returns the output.
    """

    def __init__(self, rows: Tensor, run: Callable[[], Any]) -> None:
        self._rows = rows
        self._run: Callable[[], Any] | None = run
        self._output: Any = None
        self._computed = False

    @property
    def rows(self) -> Tensor:
        """Rows to write, shaped as in a call, in the module's dtype and on its device. Uninitialized at first.

        A padded batch is as long as its longest item, and not contiguous.

        Raises:
            InputError: The output was computed, or the block has ended: other calls use the memory now.
        """
        if self._run is None:
            raise InputError("stage.rows was read after stage.output or after the block: write the rows before that")
        return self._rows

    @property
    def output(self) -> Any:
        """The module's output, owned by the caller. Computed when first read, or at the end of the block.

        Raises:
            InputError: An error ended the block before the output was computed.
        """
        self.finish()
        if not self._computed:
            raise InputError("there is no stage.output: an error ended the block before it was computed; stage again")
        return self._output

    def finish(self) -> None:
        """Compute the output, unless it was computed or the stage was closed."""
        if self._run is not None:
            run, self._run = self._run, None
            self._output = run()
            self._computed = True

    def close(self) -> None:
        """Refuse further access to the rows."""
        self._run = None


@contextmanager
def staged(rows: Tensor, run: Callable[[], Any]) -> Iterator[Stage]:
    """Let the caller write `rows` inside the block, and run them at its end at the latest."""
    stage = Stage(rows, run)
    try:
        yield stage
        stage.finish()
    finally:
        stage.close()
