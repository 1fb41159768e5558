"""Routes: packs of items with their budgets, or eager; costs, enabled budgets and eviction."""

from varlen_graphs.routing.costs import Costs
from varlen_graphs.routing.memory_limit import Memory

__all__ = [
    "Costs",
    "Memory",
]
