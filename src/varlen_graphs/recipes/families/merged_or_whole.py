"""Encoder of a tower of MiniCPM-V 4.6, which merges windows of patches between two layers, or does not."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.capture.outer_compiler import not_compiled
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.recipes.tower_encoder import SeveralEncoders, options_of_others

MERGES, PLACE = "use_vit_merger", 2
"""The argument that tells whether windows are merged, and its place among all."""


class Unmerged(nn.Module):
    """A tower that merges no windows."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower
        self.training = False  # the tower tells
        self._run = tower.forward  # now: vg.wrap puts an encoder in its place

    def forward(self, pixel_values: Tensor, target_sizes: Tensor, **options: Any) -> Any:
        """Run the tower."""
        return self._run(pixel_values, target_sizes=target_sizes, **{MERGES: False} | options)


class MergedOrWhole(SeveralEncoders):
    """Encoder of a tower of MiniCPM-V 4.6: `whole` answers calls with `use_vit_merger=False`.

    Args:
        tower: The tower.
        budgets: Those of either encoder.
        spec: The declaration of the tower.
        of_whole: That of one that merges no windows.
        forward: What is captured of the tower.
        whole: What is captured of the other.
        **options: As for `GraphedEncoder`.
    """

    def __init__(
        self, tower: nn.Module, budgets: Budgets | None, spec: BufferSpec, of_whole: BufferSpec,
        forward: Callable[..., Any], whole: Callable[..., Any], **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(tower, budgets, spec, forward=forward, **options)
        options = options_of_others(self, options)
        self.others = (GraphedEncoder(Unmerged(tower), budgets, of_whole, forward=whole, **options),)

    @property
    def whole(self) -> GraphedEncoder:
        """Encoder of calls that merge no windows."""
        return self.others[0]

    @not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Encode slices of images.

        Raises:
            InputError, LayoutError, BudgetError, CaptureError, StaleGraphError: As for any encoder.
        """
        if self.executor.forward.is_running:
            return super().forward(*args, **kwargs)
        if len(args) > PLACE:
            merges, args = args[PLACE], args[:PLACE] + args[PLACE + 1 :]
        else:
            merges = kwargs.pop(MERGES, True)
        return super().forward(*args, **kwargs) if merges else self.whole(*args, **kwargs)
