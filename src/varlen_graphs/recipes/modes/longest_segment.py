"""Torch function mode that answers transformers' question for the longest segment without a look at the host."""

import sys
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

HELPER = "get_max_seqlen"
"""Helper of transformers that reads the length of the longest segment, if its caller passes none on."""


class LongestSegment(TorchFunctionMode):
    """Function mode under which the helper returns an upper bound.

    Args:
        most: Length that no segment exceeds.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function."""
        if func is Tensor.item and sys._getframe(1).f_code.co_name == HELPER:
            return self._most
        return func(*args, **(kwargs or {}))
