"""The forward with the static arguments of one set of graphs, as it is captured."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from varlen_graphs.capture.mode import Mode
from varlen_graphs.graphs.arena import Arena
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.graphs.output_form import check_constants, check_entries, entries
from varlen_graphs.layout.item_table import ItemTable
from varlen_graphs.spec.outputs import Parts, check_extents, clear_gaps, flatten


class BoundForward:
    """The forward with static arguments, over the arena, in the mode of construction.

    Args:
        forward: The forward.
        statics: Its static arguments.
        mode: The mode that graphs hold for.
        ran: Called after each run of the module.
    """

    def __init__(self, forward: Forward, statics: dict[str, Any], mode: Mode, ran: Callable[[], None]) -> None:
        self._declared = forward.spec.declared
        self._forward = forward
        self._statics = statics
        self._mode = mode
        self._ran = ran

    def __call__(self, rows: Tensor, table: ItemTable, host: dict[str, Tensor], compiled: bool = True) -> Parts:
        """Run rows, items and host buffers, and take the output apart, checked.

        Runs the compiler's code, if there is one, unless `compiled=False`.
        """
        device = rows.device.type
        with self._mode.autocast(device):
            output = self._forward(rows, table, host, self._statics, compiled and device == "cuda")
        self._ran()
        parts = flatten(output, self._declared)
        check_extents(parts, table.budget)
        clear_gaps(parts, table)
        return parts

    def probe(self, arena: Arena) -> Sequence[Any]:
        """Return the Python values of an output without padding; the same runs check the entries of its tensors.

        Rows and items come in two proportions: a wrong declaration fits one of them at most.

        Raises:
            SpecError: The output is not as declared.
        """
        several = [self._probe(probe) for probe in arena.probes()]
        first = several[0]
        for parts in several:
            check_entries(entries(parts), entries(first))
            check_constants(parts.constants, first.constants)
        return first.constants

    def _probe(self, probe: tuple[Tensor, ItemTable, dict[str, Tensor]]) -> Parts:
        """Run a few rows without padding. Errors of the module, which may be about their shape, say so."""
        try:
            return self(*probe, compiled=False)
        except Exception as error:
            error.add_note(
                f"varlen_graphs ran the module with rows {list(probe[0].shape)}, items {probe[1].budget.items}, before "
                "the capture: if the error is about their shape, see what PackedRows(shape=...) declares, or what the "
                "first call brought"
            )
            raise


def outputs_of(parts: Parts) -> list[Tensor]:
    """Return the outputs of a graph, as memory that a replay writes."""
    return [tensor.detach().resolve_conj().resolve_neg() for tensor in parts.tensors]
