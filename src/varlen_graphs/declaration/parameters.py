"""The parameters of a function, and arguments that callers hand on to any module."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from varlen_graphs.errors import SpecError

WITHOUT_EFFECT = ("use_cache",)
"""Arguments that transformers hands on from `generate` to towers, and that mean nothing to an encoder."""

HANDED_ON = frozenset({"num_items_in_batch", "seq_idx", "cu_seqlens", "position_ids", "cache_position", "max_seqlen"})
"""Tensors that models of transformers, and their `Trainer`, hand on to towers, which compute or ignore them."""


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
