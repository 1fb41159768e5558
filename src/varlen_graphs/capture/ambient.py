"""The state around a module that its graphs freeze: read at a capture, and compared at each call."""

from typing import Any, NamedTuple

import torch

from varlen_graphs.capture.parts import EVALUATION

TRAINING_CHANGED = "training mode differs from construction"
AUTOCAST_CHANGED = "autocast differs from construction"
DTYPE_CHANGED = "the default dtype differs from the capture"
DETERMINISM_CHANGED = "deterministic algorithms differ from the capture"
TF32_CHANGED = "TF32 differs from the capture"

_deterministic_cudnn = torch._C._get_cudnn_deterministic  # what `torch.backends` takes seven times as long to tell
_precision = torch._C._get_fp32_precision_getter


class AmbientKey(NamedTuple):
    """State of the module, the thread and the process that graphs freeze, beside the arguments of a call.

    Attributes:
        training: The training mode of parts, see `ModuleParts.training`.
        autocast_cpu, autocast_cuda: The dtype of autocast; `None` where it is off.
        default_dtype: The default dtype of torch.
        deterministic: The mode of `torch.use_deterministic_algorithms`.
        deterministic_cudnn: True if cuDNN runs deterministic algorithms only.
        tf32_matmul, tf32_conv: True if matrix products, and convolutions, may round to TF32.
    """

    training: tuple[bool, ...]
    autocast_cpu: torch.dtype | None
    autocast_cuda: torch.dtype | None
    default_dtype: torch.dtype
    deterministic: int
    deterministic_cudnn: bool
    tf32_matmul: bool
    tf32_conv: bool

    def difference(self, other: "AmbientKey", of_process: bool = True) -> str | None:
        """Return why graphs of another key cannot answer a call with this one; `None` if they can.

        Settings of the process may be left out. Evaluation has graphs of its own in any case.
        """
        reasons = DIFFERENCES if of_process else DIFFERENCES[:OF_PROCESS]
        for reason, now, then in zip(reasons, self, other, strict=False):
            if now != then and now != EVALUATION:
                return reason
        return None


DIFFERENCES = (
    TRAINING_CHANGED,
    AUTOCAST_CHANGED,
    AUTOCAST_CHANGED,
    DTYPE_CHANGED,
    DETERMINISM_CHANGED,
    DETERMINISM_CHANGED,
    TF32_CHANGED,
    TF32_CHANGED,
)
"""Reasons of eager runs, by the fields of `AmbientKey`."""

OF_PROCESS = AmbientKey._fields.index("default_dtype")
"""Index of the first setting of the process, which may be another one while a model is made."""


def read_ambient(training: tuple[bool, ...]) -> tuple[Any, ...]:
    """Return the fields of the key of a call made now in this thread, with parts in such a training mode.

    A plain tuple, which is made several times as fast and equals the `AmbientKey` of the same fields.
    """
    return (
        training,
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None,
        torch.get_default_dtype(),
        torch.get_deterministic_debug_mode(),
        _deterministic_cudnn(),
        _precision("cuda", "matmul") == "tf32",
        _precision("cuda", "conv") == "tf32",
    )


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of autocast in this thread; `None` if it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
