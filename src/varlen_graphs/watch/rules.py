"""What a CUDA graph cannot hold, told from the function or operator that is called.

A capture raises at the first offence, the doctor collects them all: both ask here.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten

Kind = Literal[
    "host sync", "branch", "copy to host", "copy to device", "host tensor", "data-dependent shape", "own generator",
    "raw kernel", "sparse tensor",
]  # fmt: skip

_FROZEN = "The host does not run at a replay, so the value would be frozen."
_NOT_ALLOWED = "Such a copy is not allowed in a capture."
_KEEP = "Keep it a tensor, or declare what is computed from it as a buffer (for a longest segment: MaxSeqlen)."

WHY: dict[Kind, tuple[str, str]] = {
    "host sync": (_FROZEN, _KEEP),
    "branch": (
        "The host does not run at a replay, so one side would be frozen.",
        "Compute both sides and choose with torch.where, or declare what is chosen as a buffer.",
    ),
    "copy to host": (_FROZEN, _KEEP),
    "copy to device": (
        _NOT_ALLOWED,
        "Create the tensor on the device (torch.full, torch.arange with device=), register it as a buffer of the "
        "module, or declare a HostBuffer.",
    ),
    "host tensor": (
        "A graph reads memory of the device.",
        "Create it on the device (device=x.device), or register it as a buffer of the module.",
    ),
    "data-dependent shape": (
        "Shapes are frozen at capture, and the host would have to wait for this one.",
        "Compute with masks of a fixed shape (torch.where), or declare a buffer of a fixed capacity.",
    ),
    "own generator": (
        "A graph follows the device's default generator only.",
        "Leave generator= out, or draw the numbers before the call.",
    ),
    "raw kernel": (
        "The tape does not see what such a kernel writes.",
        "Wrap the launch in torch.library.custom_op, with a fake kernel; torch.compile needs that too.",
    ),
    "sparse tensor": (
        "It consists of several pieces of memory of its own, which can be neither followed nor held for a graph.",
        "Make it dense (to_dense(), to_padded_tensor()) before the call, or take indices and values apart.",
    ),
}  # fmt: skip
"""Why a graph cannot hold it, and what to do, by kind."""


class Offence(NamedTuple):
    """Something that cannot be part of a graph.

    Attributes:
        kind: What sort of thing it is: `WHY` says why it cannot, and what to do.
        what: What was done, in words.
    """

    kind: Kind
    what: str


_HOST_READS = {
    getattr(Tensor, name): f"Tensor.{name}"
    for name in (
        "item", "tolist", "__int__", "__float__", "__index__", "__complex__", "__repr__", "__format__",
    )
}  # fmt: skip
_BRANCHES = {getattr(Tensor, name): f"Tensor.{name}" for name in ("__bool__", "is_nonzero", "__contains__")}
_HOST_COPIES = {getattr(Tensor, name): f"Tensor.{name}" for name in ("cpu", "numpy", "__array__")}

_COND, _WHILE = torch.ops.higher_order.cond, torch.ops.higher_order.while_loop
_RANGES = {
    overload
    for packet in (aten.linspace, aten.logspace)
    for overload in (packet.Tensor_Tensor, packet.Tensor_Scalar, packet.Scalar_Tensor)
}
"""Their kernels read tensors themselves."""

IsHost = Callable[[Tensor], bool]


def function_offence(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], is_host: IsHost
) -> Offence | None:
    """What is wrong with a call of a function of torch, before any operator runs.

    Args:
        function: As `__torch_function__` gets it, like the rest.
        args: Of the call.
        kwargs: Of the call.
        tensors: Those among them.
        is_host: Whether a tensor is on the host, or would be.
    """
    from_host = bool(tensors) and is_host(tensors[0])
    if tensors and not from_host:
        if name := _named(_HOST_READS, function):
            return Offence("host sync", f"{name} reads a tensor on the host")
        if name := _named(_BRANCHES, function):
            return Offence("branch", f"{name} reads a tensor on the host")
        if name := _named(_HOST_COPIES, function):
            return Offence("copy to host", f"{name} reads a tensor on the host")
        if _copies_to_host(function, args, kwargs):
            return Offence("copy to host", "it copies a device tensor to the host")
    if _copies_to_device(function, args, kwargs, from_host and not tensors[0].is_pinned()):
        return Offence("copy to device", "it copies a host tensor to the device")
    return None


def transfer_offence(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Offence | None:
    """What is wrong with an operator that moves a tensor between the host and the device."""
    target = kwargs.get("device")
    if operator is not aten._to_copy.default or target is None or target.type == args[0].device.type:
        return None
    if target.type == "cpu":
        return Offence("copy to host", "it copies a device tensor to the host")
    if not args[0].is_pinned() or not kwargs.get("non_blocking"):
        return Offence("copy to device", "it copies a host tensor to the device")
    return None


def operator_offence(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_host: list[Tensor], is_host: IsHost
) -> Offence | None:
    """What is wrong with an operator that takes tensors of the device, some of them maybe `on_host`."""
    if not isinstance(operator, torch._ops.OpOverload):
        by_tensor = operator is _COND and isinstance(args[0], Tensor) and not is_host(args[0])
        if by_tensor or operator is _WHILE:
            return Offence("branch", f"torch.{operator.name()} reads its predicate on the host")
        return None
    if operator in _RANGES and not all(is_host(end) for end in args[:2] if isinstance(end, Tensor)):
        return Offence("host sync", f"{operator} reads where the range begins or ends on the host")
    if operator is aten._local_scalar_dense.default:
        return Offence("host sync", "it reads a value on the host")
    if _shape_depends_on_data(operator, args, kwargs, is_host):
        if operator is aten.equal.default:
            return Offence("branch", f"{operator} compares tensors for the host")
        return Offence("data-dependent shape", f"the shape of {operator}'s result depends on data")
    if any(is_host(tensor) for tensor in written_arguments(operator, args, kwargs)):
        return Offence("copy to host", f"{operator} writes a device tensor into a host tensor")
    if operator is aten.copy_.default and on_host:
        blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if blocking or not on_host[0].is_pinned():
            return Offence("copy to device", "it copies a host tensor to the device")
    for tensor in on_host:
        if tensor.dim() and operator is not aten.copy_.default:
            what = f"{operator} mixes device tensors with a host tensor {list(tensor.shape)}"
            return Offence("host tensor", what)
    if draws_random_numbers(operator, args, kwargs) and kwargs.get("generator") is not None:
        return Offence("own generator", f"{operator} draws from a generator of its own")
    return None


def draws_random_numbers(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers: dropout of nothing, and outside of training, draws none."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    named = named_arguments(operator, args, kwargs)
    return named.get("dropout_p") != 0 and named.get("train") is not False and named.get("training") is not False


def makes_on_host(kwargs: dict[str, Any]) -> bool:
    """Whether a factory with these arguments makes a host tensor; a `torch.device` may be the module's own."""
    device = kwargs.get("device")
    return device is None or (isinstance(device, str) and device == "cpu")


def has_storage(tensor: Tensor) -> bool:
    """Whether a tensor is a view of one piece of memory; sparse tensors, and nested ones but jagged ones, are not."""
    return tensor.layout is torch.jagged or (tensor.layout is torch.strided and not tensor.is_nested)


def written_arguments(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors an operator writes into."""
    if not operator._schema.is_mutable:
        return []
    named = named_arguments(operator, args, kwargs)
    written = [a.name for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [named[name] for name in written if isinstance(named.get(name), Tensor)]


def named_arguments(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an operator by their names, defaults included."""
    arguments = operator._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return defaults | {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs


def _named(names: dict[Any, str], function: Any) -> str | None:
    try:
        return names.get(function)
    except TypeError:  # an overload that cannot be hashed
        return None


def _copies_to_host(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `function` copies its tensor to the CPU by name; a `torch.device` may be the module's own."""
    return function is Tensor.to and "cpu" in (kwargs.get("device"), *(a for a in args[1:] if isinstance(a, str)))


def _copies_to_device(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], from_pageable: bool) -> bool:
    """Whether `function` copies pageable host memory to the device."""
    if function in (torch.tensor, torch.as_tensor) and not makes_on_host(kwargs):
        return not isinstance(args[0] if args else kwargs.get("data"), Tensor)
    if function is Tensor.new_tensor:
        return True
    if not from_pageable or function not in (Tensor.to, Tensor.cuda):
        return False
    targets = (*args[1:], kwargs.get("device"), kwargs.get("other"))
    return function is Tensor.cuda or any(
        isinstance(target, torch.device | Tensor) or (isinstance(target, str) and target != "cpu") for target in targets
    )


def _shape_depends_on_data(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_host: IsHost) -> bool:
    """Whether the shape of an operator's result, or a branch inside it, depends on values on the device."""
    if operator in (aten.index.Tensor, aten._unsafe_index.Tensor):
        return _has_mask(args[1])
    if operator in (aten.index_put.default, aten.index_put_.default):
        fills = args[2].numel() == 1 and is_host(args[2]) and not (len(args) > 3 and args[3])
        return _has_mask(args[1]) and not fills  # one number from the host is filled in under the mask
    if operator is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if operator is aten._linalg_check_errors.default:
        return True
    return torch.Tag.data_dependent_output in operator.tags or torch.Tag.dynamic_output_shape in operator.tags


def _has_mask(indices: Any) -> bool:
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
