"""Outputs that are lent, not copied: a handle on the memory that graphs write."""

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
    """The output of a call with `outputs="borrowed"`, in the memory where its graph wrote it.

    Any later replay or capture in the same pool, of whatever encoder, may write there: from then on the handle refuses.
    Read what is borrowed on the stream of the call; a later replay on another stream waits for what was queued on this
    one. What no single graph computed (a call that was split, that ran eager, or whose layout came on the GPU; a batch
    padded further than its budget, or packed on its way in) is the caller's own, and stays valid.
    """

    def __init__(self, output: Any) -> None:
        self._output = output

    @property
    def valid(self) -> bool:
        """Whether the output may still be read."""
        return True

    @property
    def output(self) -> Any:
        """The module's output, with the active rows only. Copies nothing.

        Raises:
            StaleOutputError: A later replay or capture in the pool may have written there.
        """
        return self._output

    def clone(self) -> Any:
        """The output as the caller's own: copied in one launch, on the current stream, if it is borrowed. No sync.

        Raises:
            StaleOutputError: A later replay or capture in the pool may have written there.
        """
        return self._output


class Lent(Borrowed):
    """Borrowed from one graph.

    Args:
        graphs: What ran; it holds the memory.
        outputs: Its outputs, padding included.
        everything: The active rows and items.
        pool: Tells whether anything was run since.
    """

    def __init__(self, graphs: Graphs, outputs: Sequence[Tensor], everything: Span, pool: Pool) -> None:
        self._graphs = graphs
        self._outputs = outputs
        self._everything = everything
        self._pool = pool
        self._turn = pool.lend()

    @property
    def valid(self) -> bool:
        """As of `Borrowed`."""
        return self._pool.turn == self._turn

    @property
    def output(self) -> Any:
        """As of `Borrowed`."""
        self._check()
        extents = self._graphs.extents
        active = [extent.part(out, self._everything) for out, extent in zip(self._outputs, extents, strict=True)]
        return self._graphs.rebuild(active)

    def clone(self) -> Any:
        """As of `Borrowed`."""
        own = Collected(self._everything)
        with torch.no_grad(), on_device(self._outputs[0].device), self._pool.exclusive():
            self._check()
            own.take(self._outputs, self._graphs.extents, [(self._everything, self._everything)])
        return self._graphs.rebuild(own.tensors)

    def _check(self) -> None:
        if not self.valid:
            raise StaleOutputError(
                f"a borrowed output was read {self._pool.turn - self._turn} calls or captures later, which write to "
                "the same memory; read it before the next call of any encoder of this pool, call clone() in time, or "
                "use outputs='owned'"
            )
