"""Checks of layouts that the host has not seen: done on the GPU, told at the next call."""

from ctypes import c_int64

import torch
from torch import Tensor

from varlen_graphs.errors import LayoutError
from varlen_graphs.kernels.check.op import check_items
from varlen_graphs.kernels.check.reference import LONGEST, MERGE, RATIO, ROWS, SEGMENTS, SIZE
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.spec.buffer_spec import BufferSpec


class Deferred:
    """Keeps what graphs find wrong with layouts on the device until the host looks there.

    Args:
        spec: The declaration the items are checked against.
        device: Where the tables are.

    Attributes:
        device: As given.
        calls: How many calls had such layouts.
        veil: float32 `[]`, written by every replay: NaN if its items were wrong and -0.0 otherwise, to be added to
            floating outputs.
        veils: The same as float32, float16 and bfloat16: of both numbers the upper half is the same in a half format.
    """

    def __init__(self, spec: BufferSpec, device: torch.device) -> None:
        self.device = device
        self.calls = 0
        self._spec = spec
        with torch.inference_mode(False):
            self.veil = torch.zeros((), dtype=torch.float32, device=device)
            halves = self.veil.view(1).view(torch.int16)[1]  # the upper one: hosts of GPUs are little-endian
            self.veils = {torch.float32: self.veil}
            self.veils |= {dtype: halves.view(dtype) for dtype in (torch.float16, torch.bfloat16)}
            self._padding = torch.tensor([0, 0, 0, *spec.layout.pads], device=device)
            self._status = torch.zeros(5, dtype=torch.int64, device=device)
            self._seen = torch.zeros(5, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self._host = (c_int64 * 5).from_address(self._seen.data_ptr())
        self._told = 0

    @property
    def memory(self) -> list[Tensor]:
        """What graphs read and write here."""
        return [self.veil, self._padding, self._status]

    def check(self, header: Tensor, table: Tensor, budget: Budget) -> None:
        """Check the table of a budget as its header asks for: the first operation of a graph.

        Where it is wrong the table becomes all padding, so that every index computed from it is valid.
        """
        spec = self._spec
        check_items(
            header, table, self._padding, self._status, self.veil, spec.layout.merge, spec.row_multiple,
            budget.segments, budget.max_seqlen, *spec.needs.by_kind,
        )  # fmt: skip

    def fetch(self) -> None:
        """Copy what was found to where the host looks. Queued on the current stream; no sync."""
        self._seen.copy_(self._status, non_blocking=True)

    def tell(self) -> None:
        """Raise what was found by the checks that have run, once: of several wrong calls the last one.

        Raises:
            LayoutError: The items of an earlier call made no sense, did not match its rows, or broke a promise.
        """
        call, code, item, came, expected = self._host
        if call <= self._told or not code:  # nothing new, or not yet written to its end
            return
        self._told = call
        name = self._spec.layout.name
        where = name if item < 0 else f"{name}[{item}]"
        what = {
            SIZE: f"{where} has a size of {came}: every size must be at least {expected}; drop empty items",
            MERGE: f"{where} has a side of {came}: h and w must be divisible by the merge size {expected}",
            ROWS: f"{where} describes {'more' if came > expected else came} rows in all, but {expected} came; pass all "
            "rows of exactly these items, in their order",
            RATIO: f"{where} has {came} rows: expected a multiple of {expected}, the ratio of the outputs",
            SEGMENTS: f"{where} describes {came} segments, more than the {expected} of the budget chosen for it by "
            "min_segment_rows; lower that, or pass the layout on the CPU",
            LONGEST: f"{where} has a segment of {came} rows, but the budget chosen for it holds at most {expected}",
        }[code]
        raise LayoutError(
            f"an earlier call, number {call} of those with {name} on the GPU, was wrong, and its output is NaN: {what}"
        )
