"""Which backend captures, by what was asked for and where the module is."""

from typing import Literal

import torch

from varlen_graphs.capture.backend import Backend
from varlen_graphs.capture.cuda import CudaCapture
from varlen_graphs.capture.pool import Pool
from varlen_graphs.capture.tape import TapeCapture
from varlen_graphs.errors import SpecError

BackendName = Literal["auto", "cuda", "tape", "eager"]


def choose_backend(name: BackendName, device: torch.device, pool: Pool) -> Backend | None:
    """The backend for a module on `device`, or `None` where calls run eager.

    Raises:
        SpecError: The backend that was asked for does not exist on this device.
    """
    on_cuda = device.type == "cuda" and torch.version.hip is None
    if name == "eager" or (name == "auto" and not on_cuda):
        return None
    if (name == "tape" and device.type != "cpu") or (name == "cuda" and not on_cuda):
        raise SpecError(f"backend={name!r} with a module on {device}: expected 'cuda' on CUDA, 'tape' on the CPU")
    pool.bind(device)
    return TapeCapture() if name == "tape" else CudaCapture(pool)
