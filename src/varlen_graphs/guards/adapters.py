"""Adapters of peft: the parts that have some, and what it sets on them without replacing anything."""

from torch import nn

_OF_ADAPTED = ("_active_adapter", "active_adapter", "_disable_adapters", "merged_adapters")

ADAPTERS = (*_OF_ADAPTED, "scaling")
"""Attributes of adapted parts that peft changes: part of the key of graphs, so calls compare them."""


def is_adapted(part: nn.Module) -> bool:
    """Return True for a part that peft adapts: a layer, a part that it keeps a copy of, a model with prompts."""
    return not vars(part).keys().isdisjoint(_OF_ADAPTED)
