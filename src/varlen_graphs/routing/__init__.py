"""Routes: replay batches of items with their budgets, or eager; costs, enabled budgets and the memory limit."""

from varlen_graphs.routing.costs import Costs

__all__ = ["Costs"]
