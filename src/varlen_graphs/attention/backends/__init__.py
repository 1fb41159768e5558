"""Attention backends, one file each.

A new backend is one new file here with the two functions of `Implementation`, an entry in `BACKENDS` and its name in
`AttentionBackend`. Every backend keeps the promise of `varlen_attention` about padding rows.
"""

from typing import Literal, Protocol

import torch
from torch import Tensor

from varlen_graphs.attention.backends import hopper_kernel, reference, torch_varlen, triton_kernel
from varlen_graphs.attention.inputs import AttentionInputs
from varlen_graphs.attention.timing import NotRepeatedError, fastest, is_measuring, note_choice, repeated
from varlen_graphs.errors import InputError

AttentionBackend = Literal["auto", "triton", "hopper", "torch", "reference"]
"""Accepted values of `backend=`."""


class Implementation(Protocol):
    """Functions that the file of a backend defines."""

    def refusal(self, inputs: AttentionInputs, compiles: bool) -> str | None:
        """Return why the backend does not support these inputs (what came, what was expected), or `None`.

        If not `compiles`, a backend with a kernel that is not compiled yet refuses: it may take long, and sync.
        """

    def run(self, inputs: AttentionInputs) -> Tensor:
        """Compute the attention, `[rows, heads, head_dim]` in the dtype of `q`. Never syncs with the host."""


BACKENDS: dict[str, Implementation] = {
    "triton": triton_kernel,
    "hopper": hopper_kernel,
    "torch": torch_varlen,
    "reference": reference,
}
"""Backends by name, in the order in which `"auto"` prefers those that were not timed. The reference comes last."""


def run(inputs: AttentionInputs, backend: str) -> Tensor:
    """Compute attention with one backend, or for `"auto"` with the fastest one that supports the inputs."""
    if inputs.q.is_cuda:
        with torch.cuda.device_of(inputs.q):  # kernels and events use the current device, not that of the tensors
            return _run(inputs, backend)
    return _run(inputs, backend)


def _run(inputs: AttentionInputs, backend: str) -> Tensor:
    if backend == "auto":
        backend = _repeated(inputs) or _fastest(inputs)
        note_choice(backend)
    elif reason := BACKENDS[backend].refusal(inputs, True):
        raise InputError(f"attention backend {backend!r} got {reason}; use backend='auto' or 'reference'")
    elif backend != "reference":
        fastest(inputs, {backend: BACKENDS[backend].run})  # times it, inside `measuring`
    return BACKENDS[backend].run(inputs)


def _fastest(inputs: AttentionInputs) -> str:
    """Return the fastest backend that supports the inputs."""
    compiles = is_measuring()
    names = [name for name in BACKENDS if name != "reference" and not BACKENDS[name].refusal(inputs, compiles)]
    return fastest(inputs, {name: BACKENDS[name].run for name in names}) if names else "reference"


def _repeated(inputs: AttentionInputs) -> str | None:
    """Return the backend that the call repeats inside `repeating`; `None` outside.

    Raises:
        NotRepeatedError: There is none, or it does not support the inputs as it is.
    """
    name = repeated()
    if name is not None and (reason := BACKENDS[name].refusal(inputs, False)):
        raise NotRepeatedError(f"attention backend {name!r} got {reason}")
    return name
