"""Checks of layouts that the host has not seen: validated on the GPU, reported to the host later."""

import logging
from ctypes import c_int64
from threading import RLock

import torch
from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.errors import LayoutError, counted
from varlen_graphs.graphs.arena import Arena
from varlen_graphs.kernels.check.op import check_items
from varlen_graphs.kernels.check.reference import LONGEST, MERGE, RATIO, ROWS, SEGMENTS, SIZE
from varlen_graphs.layouts.item_table import ItemTable

LOGGER = logging.getLogger("varlen_graphs")

STATUS = 6
"""Number of integers of the status; see `varlen_graphs.kernels.check.reference.check_items`."""


class GpuChecks:
    """Validates layouts on the device, and keeps the findings until the host looks.

    Args:
        spec: The declaration that items are checked against.
        device: The device of the item tables.

    Attributes:
        device: As given.
        calls: Number of calls with such layouts.
        nan_mask: float32 `[]`, written by every replay: NaN if its items were wrong and -0.0 otherwise, to be added to
            floating outputs.
        nan_masks: `nan_mask` as float32, float16 and bfloat16: the upper half of both numbers is the same in a half
            format.
    """

    def __init__(self, spec: BufferSpec, device: torch.device) -> None:
        self.device = device
        self.calls = 0
        self._spec = spec
        with torch.inference_mode(False):
            self.nan_mask = torch.zeros((), dtype=torch.float32, device=device)
            halves = self.nan_mask.view(1).view(torch.int16)[1]  # the upper one: hosts of GPUs are little-endian
            self.nan_masks = {torch.float32: self.nan_mask}
            self.nan_masks |= {dtype: halves.view(dtype) for dtype in (torch.float16, torch.bfloat16)}
            self._padding = torch.tensor([0, 0, 0, *spec.layout.pads], device=device)
            self._status = torch.zeros(STATUS, dtype=torch.int64, device=device)
            self._seen = torch.zeros(STATUS, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self._host = (c_int64 * STATUS).from_address(self._seen.data_ptr())
        self._logged = self._counted = self._raised = 0
        self._lock = RLock()

    @property
    def memory(self) -> list[Tensor]:
        """Tensors that graphs read and write here."""
        return [self.nan_mask, self._padding, self._status]

    def view(self, arena: Arena, budget: Budget) -> tuple[Tensor, ItemTable, dict[str, Tensor]]:
        """Return the rows, items, host buffers and inputs of a budget, the items checked as the arena's header asks.

        The check is the first operation of a graph. A wrong item table becomes all padding, so that every index
        computed from it is valid.
        """
        spec = self._spec
        check_items(
            arena.header, arena.table[: budget.items], self._padding, self._status, self.nan_mask,
            min(1, spec.layout.prefix), spec.layout.merge, spec.row_multiple, budget.segments, budget.max_seqlen,
            *spec.usage.by_kind,
        )  # fmt: skip
        return arena.view(budget)

    def fetch(self) -> None:
        """Copy the findings to the host. Queued on the current stream; no sync."""
        self._seen.copy_(self._status, non_blocking=True)

    def poll(self) -> int:
        """Log the last finding of the checks that have run, if it is new; return the number of new ones. No sync."""
        call, code, *_ = self._host
        if call <= self._logged or not code:  # nothing new, or not yet written to its end
            return 0
        with self._lock:
            call, *_, count = self._host
            if call <= self._logged:  # another thread was first
                return 0
            self._logged, new, self._counted = call, count - self._counted, count
        LOGGER.error("%s", self._finding())
        return new

    def raise_finding(self, of: int | None = None) -> None:
        """Raise the last finding of the checks that have run, if it is about this call; by default about any, once.

        Raises:
            LayoutError: The items of a call made no sense, did not match its rows, or broke a promise.
        """
        call, code, *_ = self._host
        if code and (call == of if of is not None else call > self._raised):
            self._raised = max(self._raised, call)
            raise LayoutError(self._finding())

    def _finding(self) -> str:
        call, code, item, came, expected, _ = self._host
        name = self._spec.layout.name
        where = name if item < 0 else f"{name}[{item}]"
        what = {
            SIZE: f"{where} has a size of {came}: every size must be at least {expected}"
            + "; drop empty items" * expected,
            MERGE: f"{where} has a side of {came}: h and w must be divisible by the merge size {expected}",
            ROWS: f"{where} describes {'more' if came > expected else came} rows in all, but {expected} came; pass all "
            "rows of exactly these items, in their order",
            RATIO: f"{where} has {counted(came, 'row')}: expected a multiple of {expected}, the ratio of the outputs",
            SEGMENTS: f"{where} describes {counted(came, 'segment')}, more than the {expected} of the budget chosen "
            "for it by min_segment_rows; lower that, or pass the layout on the CPU",
            LONGEST: f"{where} has a segment of {counted(came, 'row')}, but the budget chosen for it holds at most "
            f"{expected}",
        }[code]
        return f"call {call} of those with {name} on the GPU was wrong, and its floating outputs are NaN: {what}"
