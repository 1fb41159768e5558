"""Borrowed outputs: handles on the memory that graphs write, instead of copies."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.capture.pool import Pool, on_device
from varlen_graphs.errors import StaleOutputError
from varlen_graphs.graphs.graph_set import Graphs
from varlen_graphs.layout.span import Span
from varlen_graphs.serving.collect import Collected


class Borrowed:
    """Output of a call with `outputs="borrowed"`, in the memory where its graph wrote it.

    Any later replay or capture in the same pool, by any encoder, may overwrite that memory: borrowed outputs become
    invalid. Read the output on the stream of the call; a later replay on another stream waits for the work queued
    there. An output that no single graph computed is the caller's own and stays valid: that of a call that was split,
    ran eager, or had its layout on the GPU, and that of a batch that was padded beyond its budget or packed for the
    graph.
    """

    def __init__(self, output: Any) -> None:
        self._output = output

    @property
    def valid(self) -> bool:
        """True while the output may be read."""
        return True

    @property
    def output(self) -> Any:
        """The module's output, with the active rows only. No copy.

        Raises:
            StaleOutputError: A later replay or capture in the pool may have written there.
        """
        return self._output

    def clone(self) -> Any:
        """Return an output that the caller owns: copied in one launch on the current stream, if borrowed. No sync.

        Raises:
            StaleOutputError: A later replay or capture in the pool may have written there.
        """
        return self._output


class Lent(Borrowed):
    """Output borrowed from one graph; `graphs` keeps its memory, and `everything` spans its active rows."""

    def __init__(self, graphs: Graphs, outputs: Sequence[Tensor], everything: Span, pool: Pool) -> None:
        self._graphs = graphs
        self._outputs = outputs
        self._everything = everything
        self._pool = pool
        self._turn = pool.lend()

    @property
    def valid(self) -> bool:
        """See `Borrowed.valid`."""
        return self._pool.turn == self._turn

    @property
    def output(self) -> Any:
        """See `Borrowed.output`."""
        self._check()
        extents = self._graphs.extents
        active = [extent.part(out, self._everything) for out, extent in zip(self._outputs, extents, strict=True)]
        return self._graphs.rebuild(active)

    def clone(self) -> Any:
        """See `Borrowed.clone`."""
        own = Collected(self._everything)
        with torch.no_grad(), on_device(self._outputs[0].device), self._pool.exclusive():
            self._check()
            own.take(self._outputs, self._graphs.extents, [(self._everything, self._everything)])
        return self._graphs.rebuild(own.tensors)

    def _check(self) -> None:
        if not self.valid:
            raise StaleOutputError(
                f"a borrowed output was read after {self._pool.turn - self._turn} later calls or captures, which write "
                "to the same memory; read it before the next call of any encoder of this pool, call clone() before "
                "then, or use outputs='owned'"
            )
