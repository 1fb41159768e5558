"""Budgets planned from recorded traffic."""

from varlen_graphs.traffic.planning import Plan, plan
from varlen_graphs.traffic.trace import Trace

__all__ = ["Plan", "Trace", "plan"]
