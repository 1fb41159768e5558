"""Torch function mode in which a model that counts the tokens of its call counts those of each packed text."""

import sys
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Site = tuple[CodeType, int]
"""Code and line of a call."""


class PackedPositions(TorchFunctionMode):
    """Function mode of a forward on packed texts, for models that take no `position_ids` and count tokens themselves.

    `torch.arange` of as many numbers as there are rows gives the positions of the rows in their texts instead. A line
    that has asked for another number of them, in this run or one before, counts something else, such as channels.

    Args:
        positions: Position of each row in its text, int64 `[rows]`.
        others: Such lines, which runs of one model share and add to.
    """

    def __init__(self, positions: Tensor, others: set[Site]) -> None:
        super().__init__()
        self._positions, self._others = positions, others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function."""
        result = func(*args, **(kwargs or {}))
        if func is not torch.arange:
            return result
        # Code under torch.compile cannot tell its caller.
        caller = None if torch.compiler.is_compiling() else sys._getframe(1)
        site = None if caller is None else (caller.f_code, caller.f_lineno)
        if result.shape != self._positions.shape:
            if site is not None:
                self._others.add(site)
        elif site not in self._others and (first := _first(*args, **(kwargs or {}))) is not None:
            return (self._positions + first).to(result.dtype)
        return result


def _first(*args: Any, start: Any = 0, end: Any = None, step: Any = 1, **_: Any) -> int | None:
    """Return the first number of a range of integers in steps of one; `None` for any other."""
    if len(args) > 1:
        start, _, step = (*args, step)[:3]
    return start if type(start) is int and step == 1 else None
