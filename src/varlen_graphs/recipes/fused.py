"""Fused forwards for models of transformers, in place of their own, which take many small kernels."""

import re
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, NamedTuple

from torch import nn

from varlen_graphs.recipes.blocks import runs_own_forward

USUAL = {"return_dict": True, "output_attentions": False, "use_cache": False}
"""Arguments that callers may pass, and that change nothing."""


class Fused(NamedTuple):
    """A fused forward, and a pattern for the names of the modules whose own forward it replaces."""

    run: Callable[..., Any]
    parts: str

    def replaces(self, model: nn.Module) -> bool:
        """Return True if everything in a model that it replaces is as transformers has it."""
        file = type(model).__module__
        named = (part for name, part in model.named_modules() if name and re.fullmatch(self.parts, name))
        parts = [model, *named] if file.startswith("transformers.models.") else []
        return len(parts) > 1 and all(type(part).__module__ == file and runs_own_forward(part) for part in parts)


def fused_or(model: nn.Module, own: Callable[..., Any], known: Mapping[str, Fused]) -> Callable[..., Any] | None:
    """Return a forward that runs a model fused, or `None` if there is none.

    It runs the model's `own` forward in calls with other arguments, and once a forward in the model has been replaced.

    Args:
        model: The model.
        own: Its own forward.
        known: Fused forwards, by the class of the model.
    """
    fused = known.get(type(model).__name__)
    if fused is None or not fused.replaces(model):
        return None
    takes = signature(fused.run).parameters.keys()

    def forward(model: nn.Module, *args: Any, **arguments: Any) -> Any:
        given = {name: one for name, one in arguments.items() if one is not None and USUAL.get(name) is not one}
        if given.keys() <= takes and fused.replaces(model):
            return fused.run(model, *args, **given)
        return own(model, *args, **arguments)

    forward.__signature__ = signature(own)  # type: ignore[attr-defined]
    return forward
