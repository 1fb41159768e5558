"""Registration of kernels as torch operators: opaque to `torch.compile`, and visible to the tape."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.kernels.launch import Compiling

_LIBRARY = torch.library.Library("varlen_graphs", "FRAGMENT")

_references = ContextVar("varlen_graphs_references", default=False)


@contextmanager
def references() -> Iterator[None]:
    """Run the references of operators on CUDA too, for calls of this thread inside the block."""
    token = _references.set(True)
    try:
        yield
    finally:
        _references.reset(token)


def uses_references() -> bool:
    """Return True inside `references`."""
    return _references.get()


def operator(
    function: Callable[..., Any],
    *,
    cuda: Callable[..., Any] | None = None,
    fake: Callable[..., Any] | None = None,
    changes: tuple[str, ...] = (),
) -> Callable[..., Any]:
    """Register `function` as `torch.ops.varlen_graphs.<its name>` and return that operator.

    Registers directly with the dispatcher, without the wrappers of `torch.library.custom_op`, because layers call these
    operators many times in eager mode, where the wrappers cost host time. No gradients.

    Args:
        function: Implementation for all devices without another one. Its annotations become the schema, and it must not
            return one of its arguments.
        cuda: Implementation for CUDA, called with the device of the first tensor as the current device.
        fake: Implementation for tracing: returns results of the right shape and dtype. `None` if `function` can be
            traced itself, because it reads no values on the host.
        changes: Names of the arguments that it writes to.
    """
    name = function.__name__.lstrip("_")
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=changes))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    if cuda is not None:
        _LIBRARY.impl(name, _on_device_of_first(cuda, function), "CUDA")
    torch.library.register_fake(f"varlen_graphs::{name}", fake or function, lib=_LIBRARY)
    overload: Callable[..., Any] = getattr(torch.ops.varlen_graphs, name).default
    return overload


def launcher(package: str, name: str) -> Callable[..., Any]:
    """Return a function that calls `name` of `<package>.triton`, imported at the first call."""
    found: list[Callable[..., Any]] = []

    def launch(*args: Any) -> Any:
        if not found:
            found.append(getattr(import_module(f"{package}.triton"), name))
        return found[0](*args)

    return launch


def _on_device_of_first(cuda: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    def run(first: Tensor, *args: Any) -> Any:
        if _references.get():
            return reference(first, *args)
        try:
            with torch.cuda.device_of(first):
                return cuda(first, *args)
        except Compiling:
            return reference(first, *args)

    return run
