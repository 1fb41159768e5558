"""Fused forwards for models of transformers, in place of their own, which take many small kernels."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from varlen_graphs.recipes.blocks import runs_own_forward


class Fused(NamedTuple):
    """A fused forward, and a pattern for the names of the modules whose own forward it replaces."""

    run: Callable[..., Any]
    parts: str


def fused_run(model: nn.Module, known: Mapping[str, Fused]) -> Callable[..., Any] | None:
    """Return the fused forward of a model, if everything that it replaces is as transformers has it.

    Args:
        model: The model.
        known: Fused forwards, by the class of the model.
    """
    fused, file = known.get(type(model).__name__), type(model).__module__
    if fused is None or not file.startswith("transformers.models."):
        return None
    parts = [model, *(part for name, part in model.named_modules() if name and re.fullmatch(fused.parts, name))]
    own = len(parts) > 1 and all(type(part).__module__ == file and runs_own_forward(part) for part in parts)
    return fused.run if own else None
