"""Torch function mode in which a model that counts the tokens of its call counts those of each packed text."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class PackedPositions(TorchFunctionMode):
    """Function mode of a forward on packed texts, for models that take no `position_ids` and count tokens themselves.

    Args:
        positions: Position of each row in its text, int64 `[rows]`: what `torch.arange` gives for as many rows. Ranges
            of another length are what they are.
    """

    def __init__(self, positions: Tensor) -> None:
        super().__init__()
        self._positions = positions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function."""
        given = kwargs or {}
        if func is torch.arange and (first := self._first(*args, **given)) is not None:
            return (self._positions + first).to(given.get("dtype") or torch.int64)
        return func(*args, **given)

    def _first(self, *args: Any, start: Any = 0, end: Any = None, step: Any = 1, **_: Any) -> int | None:
        """Return the first number of a range that counts the rows; `None` for any other."""
        if args:
            start, end, step = [(0, *args, 1), (*args, 1), args][len(args) - 1][:3]
        counts = type(start) is int and type(end) is int and step == 1
        return start if counts and end - start == len(self._positions) else None
