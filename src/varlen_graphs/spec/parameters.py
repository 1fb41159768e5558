"""The parameters of a function, by name."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from varlen_graphs.errors import SpecError


def parameters_of(function: Callable[..., Any], name: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function; `name` is for messages.

    Raises:
        SpecError: It does not tell them.
    """
    try:
        return inspect.signature(function).parameters
    except ValueError:  # built-in, or of torch.jit.trace
        raise SpecError(
            f"{name} does not tell its arguments: expected a Python function with named arguments, which may call it"
        ) from None
