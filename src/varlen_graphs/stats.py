"""What an encoder did so far."""

from collections import Counter
from dataclasses import dataclass, field

from varlen_graphs.budgets import Budget


@dataclass
class Stats:
    """Counters of an encoder.

    Attributes:
        calls: Calls.
        items: Items of all calls.
        replays: Replays of each budget.
        eager: Runs without a graph, by reason.
        rows: Active rows that were replayed.
        padding: Rows of padding that were replayed with them.
    """

    calls: int = 0
    items: int = 0
    replays: Counter[Budget] = field(default_factory=Counter)
    eager: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    padding: int = 0

    @property
    def padding_share(self) -> float:
        """Padding among all replayed rows, 0 to 1."""
        return self.padding / max(1, self.rows + self.padding)
