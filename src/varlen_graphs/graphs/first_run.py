"""Run a module on a few rows that no call brought."""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.errors import CaptureError, SpecError
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.outputs.parts import Parts
from varlen_graphs.torch_dispatch.checked_indices import CheckedIndices, OutOfRangeError, run_checked
from varlen_graphs.torch_dispatch.thread_modes import run_under, unwatched

ID_LIMIT = 1024
"""Integer rows are below this, and below the size of every table of the module, which they may index."""


def run_on_sample(
    run: Callable[..., Parts],
    rows: Tensor,
    given: dict[str, Tensor],
    forward: Forward,
    which: int,
    checked: bool = True,
) -> Parts:
    """Run a function of rows, and `given` ones beside them, on others of the same form; see `other_values`.

    Indices are checked first on a GPU, because the module may not have all ids that seem valid, but for what ran before
    (`checked=False`).

    Raises:
        SpecError: Values of padding, or defaults, that are declared are no indices that the module takes.
    """
    spec = forward.spec
    with unwatched():  # whoever watches the run takes these for what calls bring
        ids = valid_ids(forward, spec.row_input.pad, rows.dtype, spec.row_input.normalize is not None)
        sample, beside = other_values(rows, which, ids), {}
        for one in spec.inputs:
            if one.name in given:
                tensor = given[one.name]
                if which == 0 and one.default is not None:
                    tensor = torch.full_like(tensor, one.default)
                beside[one.name] = other_values(tensor, which, valid_ids(forward, one.pad, tensor.dtype))
    given = given | beside
    has_ids = bool(spec.layout.columns) or not all(tensor.is_floating_point() for tensor in (sample, *given.values()))
    synthetic = partial(run, sample, given=given)
    run_it = partial(run_checked, synthetic, sample.device) if has_ids and checked else synthetic
    if which > 1:
        return run_it()
    try:
        return run_it()
    except CaptureError as error:  # of something that the module raised
        if (found := _out_of_range(error, synthetic)) is not None:
            raise SpecError(_wrong_values(type(forward.module).__name__, spec, found)) from error
        raise


def _out_of_range(error: Exception, run: Callable[[], Parts]) -> OutOfRangeError | None:
    """Return the indices out of range behind an error of a run, if it is about some: the CPU does not say which."""
    if isinstance(error.__cause__, IndexError | RuntimeError) and not isinstance(error.__cause__, OutOfRangeError):
        try:
            run_under(run, CheckedIndices())
        except Exception as again:
            error = again
    return error.__cause__ if isinstance(error.__cause__, OutOfRangeError) else None


def _is_integral(dtype: torch.dtype) -> bool:
    """Return True if tensors of a dtype may be indices."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _wrong_values(name: str, spec: BufferSpec, found: OutOfRangeError) -> str:
    """Return what is wrong with declared values that a module does not take as indices."""
    tensors: list[Any] = [spec.row_input, *spec.host_buffers, *spec.inputs]
    declared = [one for one in tensors if one.dtype and _is_integral(one.dtype)]
    wrong = [
        f"{type(one).__name__}({one.name!r}, {field}={value})"
        for one in (*declared, *spec.layout.columns)
        for field in ("pad", "default")
        if (value := getattr(one, field, None)) is not None and not found.least <= value <= found.most
    ]
    return (
        f"{name} is captured with padding, and takes indices from {max(0, found.least)} to {found.most}, but got "
        f"{found.low if found.low < found.least else found.high}: "
        + (f"{', '.join(wrong)}; declare a value that it takes" if wrong else "a buffer computes it from padding")
    )


def other_values(tensor: Tensor, which: int, ids: range) -> Tensor:
    """Return another tensor of the same form: any numbers; of integers the same for 0 and 1, else some of `ids`.

    Numbers of 3 are those of 2 in reverse with the other sign: one of them moves the maximum that the other leaves.
    """
    if tensor.is_floating_point() or tensor.is_complex():
        steps = torch.arange(1, tensor.numel() + 1, device=tensor.device)
        numbers = steps.flip(0).mul(2).cos().mul(-2) if which == 3 else steps.mul(which).cos().mul(which)
        return numbers.view(tensor.shape).to(tensor.dtype)
    if which < 2:
        return tensor.clone()
    steps = torch.arange(tensor.numel(), device=tensor.device).mul(2 * which + 1).add(which)
    return steps.remainder(len(ids)).add(ids.start).view(tensor.shape).to(tensor.dtype)


def valid_ids(forward: Forward, pad: float, dtype: torch.dtype, pixels: bool = False) -> range:
    """Return the integers that entries may hold: the declared pad is valid, and so are ids below all tables."""
    if dtype.is_floating_point or dtype.is_complex:
        return range(0)
    if pixels or dtype in (torch.bool, torch.uint8):
        return range(2 if dtype == torch.bool else 128)
    pad = int(pad)
    tensors = chain(forward.module.parameters(), forward.module.buffers())
    end = min([ID_LIMIT, *(len(tensor) for tensor in tensors if tensor.dim() > 1 and len(tensor) > 1)])
    if pad + 2 <= end:
        return range(max(0, pad), end)
    return range(end) if 0 <= pad < end else range(pad, pad + 1)
