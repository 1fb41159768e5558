"""Budgets of towers in engines."""

from varlen_graphs.budgets.ladder import DefaultBudgets, Ladder

DEFAULT = DefaultBudgets(Ladder(step=1.08))
"""Default budgets: an engine waits for all of its graphs before its first request.

Calls take some 2 % longer than with `Ladder()`, which has 2.6 times as many graphs to wait for (docs/engines.md).
"""
