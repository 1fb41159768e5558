"""How one call runs: packs of items with their budgets, or eager."""

from varlen_graphs.routing.costs import Costs

__all__ = [
    "Costs",
]
