"""How kernels become operators of torch: opaque to its compiler, seen by the tape, replaced by shapes while tracing."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("varlen_graphs", "FRAGMENT")


def operator(
    function: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    cuda: Callable[..., Any] | None = None,
    changes: tuple[str, ...] = (),
) -> Callable[..., Any]:
    """Register `function` as `torch.ops.varlen_graphs.<its name>`.

    Registered as the dispatcher takes it, without the wrappers of `torch.library.custom_op`, because layers call such
    operators many times where a module runs without a graph. No gradients.

    Args:
        function: What runs, on every device that nothing else is given for. Its annotations are the schema; it returns
            no argument.
        fake: The shapes and dtypes of the result, for the compiler.
        cuda: What runs on CUDA; the device of the first tensor is the current one inside.
        changes: The arguments that it writes to.
    """
    name = function.__name__.lstrip("_")
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=changes))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    if cuda is not None:
        _LIBRARY.impl(name, _on_device_of_first(cuda), "CUDA")
    torch.library.register_fake(f"varlen_graphs::{name}", fake, lib=_LIBRARY)
    overload: Callable[..., Any] = getattr(torch.ops.varlen_graphs, name).default
    return overload


def launcher(package: str, name: str) -> Callable[..., Any]:
    """The function of that name in the `triton` module of a package, imported at the first call."""
    found: list[Callable[..., Any]] = []

    def launch(*args: Any) -> Any:
        if not found:
            found.append(getattr(import_module(f"{package}.triton"), name))
        return found[0](*args)

    return launch


def _on_device_of_first(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(first: Tensor, *args: Any) -> Any:
        with torch.cuda.device_of(first):
            return function(first, *args)

    return run
