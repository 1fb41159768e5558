"""The encoders of a wrapped model."""

import os
from collections.abc import Mapping

from varlen_graphs.calls.warmup_file import write_sections
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import SpecError, counted
from varlen_graphs.huggingface.installed import Installed
from varlen_graphs.stats import Stats


class Encoders(dict[str, GraphedEncoder]):
    """Encoders of a wrapped model by the paths of their towers.

    Attributes:
        how: Names of the recipes that graph the towers, by path.
        eager: Why other modules that look like towers stay eager, by their paths in the model that was wrapped; among
            them towers without a recipe that have no encoder yet, because a part of them is in training mode.
        stats: Counters of all towers by path, those without an encoder included.
    """

    def __init__(self, installed: Mapping[str, Installed]) -> None:
        super().__init__()
        self.how: dict[str, str] = {}
        self.eager: dict[str, str] = {}
        self.stats: dict[str, Stats] = {}
        for path, one in installed.items():
            self.eager |= one.shared.eager
            self.stats[path] = one.stats
            if (reason := one.why_none()) is not None:
                self.eager[path] = reason
                continue
            try:
                self[path] = one.encoder
            except SpecError as error:
                if one.tower.declared:
                    raise
                self.eager[path] = str(error)
            else:
                self.how[path] = one.tower.recipe.__name__
                self.stats[path] = one.stats

    def save_warmup(self, path: str | os.PathLike[str]) -> None:
        """Write the measurements of all encoders to one file, for `wrap(model, capture=Capture(warmup=path))`.

        It has a section for each tower, as `GraphedEncoder.save_warmup` writes one. Without a tower nothing is written.
        """
        if sections := [one for encoder in self.values() for one in encoder.warmup_sections()]:
            write_sections(path, sections)

    def report(self) -> str:
        """Return how each tower was understood, what ran eager and why, and the report of each encoder."""
        lines = []
        for path, encoder in self.items():
            name = type(encoder.module).__name__
            lines.append(f"{path or name}: {name}, graphed by {self.how[path]}")
            lines += [f"  {line}" for line in str(encoder.report()).splitlines()]
        for path, reason in self.eager.items():
            lines.append(f"{path or 'the model itself'}: eager, {reason}")
            if path in self.stats:
                lines += [f"  {counted(count, 'call')}: {why}" for why, count in self.stats[path].eager.items()]
        return "\n".join(lines) or "no tower is wrapped"
