"""Capacities of graphs: a budget each, ladders of many, and the memory they take."""

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.budgets.ladder import DefaultBudgets, Ladder, PaddedLadder

__all__ = ["Budget", "DefaultBudgets", "Ladder", "PaddedLadder"]
