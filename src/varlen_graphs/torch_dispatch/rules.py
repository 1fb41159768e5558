"""Rules of CUDA graph capture: which torch functions and operators a graph cannot hold.

A capture raises at the first violation; the doctor collects all of them. Both use these rules.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from varlen_graphs.torch_dispatch.leaves import tensors_in
from varlen_graphs.torch_dispatch.uploads import IsHost, NamesHost, copies_to_device, makes_empty, targets

aten = torch.ops.aten

ViolationKind = Literal[
    "host sync", "branch", "copy to host", "copy to device", "host tensor", "data-dependent shape", "own generator",
    "sparse tensor", "write count", "nested batch",
]  # fmt: skip

_FROZEN = "Host code does not run during a replay, so the value would be frozen."
_KEEP = "Keep it a tensor, or declare what is computed from it as a buffer (for a longest segment: MaxSeqlen)."

EXPLANATIONS: dict[ViolationKind, tuple[str, str]] = {
    "host sync": (_FROZEN, _KEEP),
    "branch": (
        "Host code does not run during a replay, so the branch taken at capture would be frozen.",
        "Compute both branches and select with torch.where, or declare the result as a buffer.",
    ),
    "copy to host": (_FROZEN, _KEEP),
    "copy to device": (
        "A graph holds copies of host tensors that the forward makes of sizes and Python numbers, alike in each run; "
        "it reads no other host memory, unless that is pinned, outlives the graph, and is copied with "
        "non_blocking=True.",
        "Create the tensor on the device (torch.full, torch.arange with device=), register it as a buffer of the "
        "module, or declare a HostBuffer.",
    ),
    "host tensor": (
        "A graph reads device memory only, and holds copies of host indices that the forward makes of sizes and Python "
        "numbers, alike in each run.",
        "Create it on the device (device=x.device), or register it as a buffer of the module.",
    ),
    "data-dependent shape": (
        "Shapes are frozen at capture, and the host would have to wait for the data that determines this one.",
        "Use masks of a fixed shape (torch.where), or declare a buffer of a fixed capacity.",
    ),
    "own generator": (
        "A graph advances only the default generator of the device.",
        "Omit generator=, or draw the numbers before the call.",
    ),
    "sparse tensor": (
        "It consists of several pieces of memory, which cannot be tracked and kept alive for a graph.",
        "Make it dense (to_dense(), to_padded_tensor()) before the call, or pass indices and values separately.",
    ),
    "write count": (
        "Host code does not run during a replay, so what follows from the count would stay as it is while weights "
        "change in place.",
        "Compute in each run what is kept for as long as the weights are the same.",
    ),
    "nested batch": (
        "torch.nn.TransformerEncoder looks at its mask on the host, and computes without padding.",
        "Make it with enable_nested_tensor=False, or set encoder.use_nested_tensor = False, which computes the same.",
    ),
}  # fmt: skip
"""Reason and remedy by kind of violation."""

MASK_REMEDY = (
    "transformers decides on the host which mask its model needs: declare it as a vg.buffers.AttentionMask, with the "
    "windows and the causality of the model, and pass it by forward=; it is used as it is."
)
"""Remedy for the lines of transformers that make attention masks from key padding masks."""


class Violation(NamedTuple):
    """Operation that cannot be part of a graph, and its description for messages."""

    kind: ViolationKind
    what: str


_READS: dict[ViolationKind, str] = {
    "host sync": "item tolist __int__ __float__ __index__ __complex__ __repr__ __format__",
    "branch": "__bool__ is_nonzero __contains__",
    "copy to host": "cpu numpy __array__",
}
_HOST_READS = {
    getattr(Tensor, name): Violation(kind, f"Tensor.{name} reads a tensor on the host")
    for kind, names in _READS.items()
    for name in names.split()
} | {
    Tensor._version.__get__: Violation("write count", "Tensor._version tells how often a tensor was written")  # type: ignore[attr-defined]
}

_COND, _WHILE = torch.ops.higher_order.cond, torch.ops.higher_order.while_loop
_RANGES = {
    overload
    for packet in (aten.linspace, aten.logspace)
    for overload in (packet.Tensor_Tensor, packet.Tensor_Scalar, packet.Scalar_Tensor)
}
"""Their kernels read the tensors of their ends on the host."""

_METADATA = ("aten", "prim", "prims", "quantized")
"""Namespaces whose operators that return numbers read no memory, but for those of `_NUMBERS`."""

_NUMBERS = {
    aten._local_scalar_dense.default,
    aten._nested_tensor_from_mask_left_aligned.default,
    aten.is_nonzero.default,
}

FACTORIES = {
    torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.logspace, torch.ones, torch.rand,
    torch.randint, torch.randn, torch.randperm, torch.range, torch.scalar_tensor, torch.zeros,
}  # fmt: skip
"""Functions that create tensors on the host unless `device=` says otherwise, even from numbers in device tensors."""


def function_violation(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Tensor],
    is_host: IsHost,
    names_host: NamesHost,
) -> Violation | None:
    """Return the violation by a call of a torch function, before any operator runs.

    `tensors` are its arguments; `names_host` tells whether a device, its name, or that of a tensor, is the host.
    """
    from_host = bool(tensors) and is_host(tensors[0])
    if tensors and not from_host:
        if violation := _host_read(function):
            return violation
        if function in (Tensor.to, Tensor.type_as) and any(map(names_host, targets(args, kwargs))):
            return Violation("copy to host", "it copies a device tensor to the host")
    if copies_to_device(function, args, kwargs, from_host, names_host) and not makes_empty(function, args, kwargs):
        return Violation("copy to device", "it copies a host tensor to the device")
    return None


def transfer_violation(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Violation | None:
    """Return the violation by an operator that moves a tensor between host and device."""
    target = kwargs.get("device")
    if operator is not aten._to_copy.default or target is None or target.type == args[0].device.type:
        return None
    if target.type == "cpu":
        return Violation("copy to host", "it copies a device tensor to the host")
    if not args[0].is_pinned() or not kwargs.get("non_blocking"):
        return Violation("copy to device", "it copies a host tensor to the device")
    return None


def operator_violation(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_host: list[Tensor], is_host: IsHost
) -> Violation | None:
    """Return the violation by an operator that takes device tensors; `on_host` are its host tensors, if any."""
    if not isinstance(operator, torch._ops.OpOverload):
        by_tensor = operator is _COND and isinstance(args[0], Tensor) and not is_host(args[0])
        if by_tensor or operator is _WHILE:
            return Violation("branch", f"torch.{operator.name()} reads its predicate on the host")
        return None
    if operator in _RANGES and not all(is_host(end) for end in args[:2] if isinstance(end, Tensor)):
        return Violation("host sync", f"{operator} reads where the range begins or ends on the host")
    if operator is aten._local_scalar_dense.default:
        return Violation("host sync", "it reads a value on the host")
    if operator is aten._nested_tensor_from_mask_left_aligned.default:
        return Violation("nested batch", "it makes nested tensors of a batch and src_key_padding_mask")
    if _returns_numbers(operator):
        return Violation("host sync", f"{operator} returns numbers that it reads from device tensors")
    if _reads_inside(operator, args, kwargs):
        return Violation("host sync", f"{operator} reads device tensors on the host")
    if _shape_depends_on_data(operator, args, kwargs, is_host):
        if operator is aten.equal.default:
            return Violation("branch", f"{operator} compares tensors for the host")
        return Violation("data-dependent shape", f"the shape of {operator}'s result depends on data")
    if any(is_host(tensor) for tensor in written_arguments(operator, args, kwargs)):
        return Violation("copy to host", f"{operator} writes a device tensor into a host tensor")
    if operator is aten.copy_.default and on_host:
        blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if blocking or not on_host[0].is_pinned():
            return Violation("copy to device", "it copies a host tensor to the device")
    for tensor in on_host:
        if tensor.dim() and operator is not aten.copy_.default:
            return Violation("host tensor", f"{operator} mixes device tensors with a host tensor {list(tensor.shape)}")
    if draws_random_numbers(operator, args, kwargs) and kwargs.get("generator") is not None:
        return Violation("own generator", f"{operator} draws from a generator of its own")
    return None


def draws_random_numbers(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if an operator draws random numbers; dropout does not at probability 0, nor outside of training."""
    if not has_tag(operator, torch.Tag.nondeterministic_seeded):
        return False
    named = named_arguments(operator, args, kwargs)
    return named.get("dropout_p") != 0 and named.get("train") is not False and named.get("training") is not False


def reads_host(function: Any) -> bool:
    """Return True if a torch function reads the values of its tensor on the host."""
    return _host_read(function) is not None


def creates_on_host(function: Any, tensors: list[Tensor], kwargs: dict[str, Any], names_host: NamesHost) -> bool:
    """Return True if a function, called with these tensors, creates host tensors."""
    device = kwargs.get("device")
    return (function in FACTORIES or not tensors) and (device is None or names_host(device))


def checks_on_cpu(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a function reads tensors on the host to check their values, but on the CPU only."""
    if function is nn.functional.one_hot:
        return bool((args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) > 0)
    return function in (torch.quantile, torch.nanquantile, Tensor.quantile, Tensor.nanquantile)


def has_storage(tensor: Tensor) -> bool:
    """Return True if a tensor has a single storage: not if it is sparse, or nested with another layout than jagged."""
    return tensor.layout is torch.jagged or (tensor.layout is torch.strided and not tensor.is_nested)


def written_arguments(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes into, those of lists included."""
    written = _written_names(operator)
    if not written:  # nearly always
        return []
    named = named_arguments(operator, args, kwargs)
    return tensors_in(tuple([named.get(name) for name in written]), {})


@functools.cache
def _written_names(operator: Any) -> tuple[str, ...]:
    """Return the names of the arguments that an operator writes into; to ask its schema each time takes long."""
    arguments = operator._schema.arguments
    return tuple(one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write)


def named_arguments(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator call by name, defaults included."""
    arguments = operator._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return defaults | {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs


def _host_read(function: Any) -> Violation | None:
    try:
        return _HOST_READS.get(function)
    except TypeError:  # an overload that cannot be hashed
        return None


def _shape_depends_on_data(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_host: IsHost) -> bool:
    """Return True if the shape of an operator's result, or a branch inside it, depends on device data."""
    if operator in (aten.index.Tensor, aten._unsafe_index.Tensor):
        return _has_mask(args[1])
    if operator in (aten.index_put.default, aten.index_put_.default):
        fills = args[2].numel() == 1 and is_host(args[2]) and not (len(args) > 3 and args[3])
        return _has_mask(args[1]) and not fills  # fills the mask with one host number
    if operator is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if operator is aten._linalg_check_errors.default:
        return True
    return has_tag(operator, torch.Tag.data_dependent_output) or has_tag(operator, torch.Tag.dynamic_output_shape)


def has_tag(operator: Any, tag: torch.Tag) -> bool:
    """Return True if an operator has a tag; those of higher order, such as `torch.cond`, have none."""
    return tag in getattr(operator, "tags", ())


def _returns_numbers(operator: Any) -> bool:
    """Return True if the results of an operator are Python numbers, which it must read from its tensors."""
    if operator.namespace in _METADATA:
        return operator in _NUMBERS
    kinds = [str(own.type).removesuffix("[]") for own in operator._schema.returns]
    return bool(kinds) and all(kind in ("int", "float", "bool", "number", "SymInt") for kind in kinds)


def _reads_inside(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if the kernel of an operator reads tensors on the host, mostly to check their values."""
    if operator not in _READERS:
        return False
    named = named_arguments(operator, args, kwargs)
    return _READERS[operator](named)


_READERS: dict[Any, Callable[[dict[str, Any]], bool]] = {
    aten.segment_reduce.default: lambda named: named["lengths"] is not None and not named["unsafe"],
    aten.histc.default: lambda named: named["min"] == named["max"],
    aten.multinomial.default: lambda named: not named["replacement"] or named["num_samples"] == 1,
    aten.normal.float_Tensor: lambda named: True,
    aten.normal.Tensor_Tensor: lambda named: True,
    aten._ctc_loss.Tensor: lambda named: True,
    aten._ctc_loss.default: lambda named: True,
    aten.linalg_eig.default: lambda named: True,
}
"""Operators whose kernels read tensors on the host, and whether they do with these arguments."""


def _has_mask(indices: Any) -> bool:
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
