"""Encoder of a tower that takes packed items of any size, and batches of items of one size."""

import inspect
from typing import Any

from torch import nn

from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import SpecError
from varlen_graphs.recipes.automatic.by_batch import by_batch
from varlen_graphs.recipes.tower_encoder import SeveralEncoders, options_of_others


class PackedOrBatch(SeveralEncoders):
    """Encoder of packed items, as declared, with an encoder of its own for batches.

    Calls without the argument that describes the items bring a batch. Budgets, statistics and the report of this
    encoder are those of packed items; `batches` has its own.

    Attributes:
        batches: Encoder of batches, found by `by_batch`; `None` if the tower itself answers them.
        why_eager: Reason why it does; `None` if it does not.
    """

    def __init__(self, module: nn.Module, budgets: Budgets | None, spec: BufferSpec, **options: Any) -> None:
        super().__init__(module, budgets, spec, **options)
        parameters = inspect.signature(module.forward).parameters.values()
        self._names = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        self.why_eager: str | None = None
        try:
            self.others = (by_batch(module, **options_of_others(self, options)),)
        except SpecError as error:
            self.why_eager = f"a batch: {error}"

    @property
    def batches(self) -> GraphedEncoder | None:
        """Encoder of batches."""
        return next(iter(self.others), None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Encode packed items, or a batch.

        Raises:
            InputError, LayoutError, BudgetError, CaptureError, StaleGraphError: As for any encoder.
        """
        call = dict(zip(self._names, args, strict=False)) | kwargs
        if call.get(self.spec.layout.name) is not None or self.executor.forward.is_running:
            return super().forward(*args, **kwargs)
        if self.batches is not None:
            return self.batches(*args, **kwargs)
        return self._itself(self.why_eager or "", len(next(iter(call.values()), ())), args, kwargs)
