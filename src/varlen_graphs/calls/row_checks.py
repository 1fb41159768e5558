"""Check the tensors of a call against those that graphs read."""

import torch
from torch import Tensor

from varlen_graphs.checks.values import check_not_freed
from varlen_graphs.declaration.call import Call
from varlen_graphs.errors import InputError, SpecError
from varlen_graphs.graphs.store import GraphStore
from varlen_graphs.layouts.dtypes import why_not_loaded

PRECISE = 4
"""Bytes of a floating number that is not cast to fewer unless that is declared: it may be a time, or a position."""


def check_rows(store: GraphStore, device: torch.device, dtype: torch.dtype) -> None:
    """Check that rows have the device and dtype that the module takes.

    Raises:
        InputError: Rows on another device, or of a dtype that is not cast.
        StaleGraphError: The module was moved to another device since the capture.
    """
    forward, arena = store.forward, store.arena  # which another thread may release
    name = forward.spec.row_input.name
    if arena is not None:
        here, expected = arena.rows.device, arena.rows.dtype
    else:
        here, expected = forward.device or device, forward.row_dtype
    if device != here and here.type != "meta":
        with store.pool.exclusive(), store.pool.order:
            store.check_memory()
        here = forward.device or device
    if here.type == "meta" and (reason := why_not_loaded(forward.module)) is not None:
        raise InputError(reason)
    if device.type == "meta":
        raise InputError(f"{name} is on the meta device, where it has no values: expected it on {here}")
    if device != here:
        raise InputError(f"{name} is on {device}, the module on {here}; move it first, for example {name}.to('{here}')")
    if dtype != expected and not (dtype.is_floating_point and expected.is_floating_point):
        declared = forward.spec.advice(f", or declare rows=vg.inputs.Rows({name!r}, dtype={dtype})", "")
        raise InputError(
            f"{name} is {dtype}: expected {expected}; floating rows are cast, others are not: convert them{declared}"
        )


def check_extra_inputs(store: GraphStore, call: Call) -> None:
    """Check that the tensors beside the rows of a call have the device and dtype that the module takes.

    Raises:
        InputError: One is on another GPU, of a dtype that is not cast, or its memory was freed.
    """
    forward, here = store.forward, call.rows.device
    for one in forward.spec.inputs:
        tensor, wanted = call.inputs.get(one.name), forward.input_dtype(one)
        if tensor is None:
            continue
        check_not_freed(tensor, one.name)
        if tensor.device != here and tensor.device.type != "cpu":
            raise InputError(f"{one.name} is on {tensor.device}: expected it on {here}, like the rows, or on the CPU")
        if tensor.dtype != wanted and not (tensor.is_floating_point() and wanted.is_floating_point):
            declared = f", or declare {type(one).__name__}({one.name!r}, dtype={tensor.dtype})"
            raise InputError(
                f"{one.name} is {tensor.dtype}: expected {wanted}; floating tensors are cast, others are not: convert "
                f"it{forward.spec.advice(declared, '')}"
            )
        if one.dtype is None and wanted.itemsize < PRECISE <= tensor.dtype.itemsize:
            declared = (
                f"declare {type(one).__name__}({one.name!r}, dtype=torch.float32) for the module to get them as they "
                f"are, or dtype={wanted} to have them cast"
            )
            raise InputError(
                f"{one.name} is {tensor.dtype}, or numbers, and the module {wanted}, which would round them: "
                f"{forward.spec.advice(declared, f'pass {wanted}')}"
            )


def no_rows(store: GraphStore) -> Tensor:
    """Return no rows, `[0, ...]`, with the dtype and device of rows.

    Raises:
        SpecError: These are not known yet.
    """
    arena, forward = store.arena, store.forward
    packed, device = forward.spec.row_input, forward.device
    none = (0,) * len(forward.spec.row_extent.dims)
    if arena is not None:
        return arena.rows.new_empty(*none, *arena.rows.shape[1:])
    if (reason := None if device is None or device.type != "meta" else why_not_loaded(forward.module)) is not None:
        raise SpecError(reason)
    shape = forward.spec.layout.usual if packed.shape is None else packed.shape
    if shape is None or device is None:
        declared = (
            f"declare rows=vg.inputs.Rows({packed.name!r}, shape=...) or Batch(usual=...), or make a call instead"
        )
        raise SpecError(
            f"the shape of {packed.name} is not known before the first call, or the module has no parameter to tell its"
            f" device; {forward.spec.advice(declared, 'make a call first')}"
        )
    return torch.empty(*none, *shape, dtype=forward.row_dtype, device=device)
