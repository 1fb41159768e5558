"""Forks of this process, which neither CUDA nor graphs survive."""

import os


class Forks:
    """Counter of the forks that lead to this process."""

    def __init__(self) -> None:
        self.count = 0
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._increment)

    def _increment(self) -> None:
        self.count += 1


FORKS = Forks()
