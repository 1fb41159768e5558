"""The encoders of a wrapped model."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self, TypeVar

from varlen_graphs.calls.gauges import bytes_of
from varlen_graphs.calls.html import Section, page
from varlen_graphs.calls.warmup_file import write_sections
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import SpecError, counted
from varlen_graphs.huggingface.installed import Installed
from varlen_graphs.recipes.tower_encoder import SeveralEncoders
from varlen_graphs.stats import Stats, prometheus
from varlen_graphs.verify.given_calls import Verified

Result = TypeVar("Result")


class Encoders(dict[str, GraphedEncoder]):
    """Encoders of a wrapped model by the paths of their towers; what one of them can do, this does for all.

    An error of one of them has a note with its path.

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

    def capture(self) -> Self:
        """Capture all graphs now: what is missing for calls so far, or else as `GraphedEncoder.capture` does.

        Raises:
            SpecError: An encoder needs a call to know the shape of its rows: give it one.
        """
        self._each(lambda path, one: one.capture_again() if one.executor.store.sets else one.capture())
        return self

    def capture_in_background(self) -> dict[str, "Future[None]"]:
        """Capture in threads, by path: see `GraphedEncoder.capture_in_background`."""
        return self._each(lambda path, one: one.capture_in_background())

    def check(self) -> None:
        """Check what graphs read, and layouts that only the GPU has seen: see `GraphedEncoder.check`."""
        self._each(lambda path, one: one.check())

    def verify(
        self, calls: Mapping[str, Iterable[Mapping[str, Any]]], *, tolerance: float | None = None
    ) -> dict[str, Verified]:
        """Verify encoders on example calls of each, by path: see `GraphedEncoder.verify`.

        Raises:
            SpecError: There is no encoder at a path.
        """
        if unknown := [path for path in calls if path not in self]:
            raise SpecError(f"there is no encoder at {unknown}: expected paths among {[*self]}")
        return self._each(lambda path, one: one.verify(calls[path], tolerance=tolerance), [*calls])

    def release(self) -> None:
        """Free all graphs; later calls capture anew: see `GraphedEncoder.release`."""
        self._each(lambda path, one: one.release())

    def bytes(self) -> int:
        """Return the bytes that graphs, arenas and pools hold, each pool once."""
        return bytes_of(one.executor.store for _, one in self._all())

    def prometheus(self, prefix: str = "varlen_graphs", **labels: object) -> str:
        """Return one page of metrics, with the path of a tower as the label `encoder`: see `vg.stats.prometheus`.

        Towers without an encoder have counters, too: of calls that run eager. Encoders that answer some calls of a
        tower have its path and a number.
        """
        return prometheus({**self.stats, **dict(self._all())}, prefix, **labels)

    def _all(self) -> Iterator[tuple[str, GraphedEncoder]]:
        """Yield all encoders by path, and those that answer some calls of another behind it by path and number."""
        for path, one in self.items():
            yield path, one
            for number, other in enumerate(one.others if isinstance(one, SeveralEncoders) else (), start=1):
                yield f"{path}#{number}", other

    def _each(
        self, run: Callable[[str, GraphedEncoder], Result], paths: Sequence[str] | None = None
    ) -> dict[str, Result]:
        """Return what a function returns for each encoder, or for some, by path."""
        found = {}
        for path in [*self] if paths is None else paths:
            try:
                found[path] = run(path, self[path])
            except Exception as error:
                error.add_note(f"in the encoder of {path!r}")
                raise
        return found

    def save_warmup(self, path: str | os.PathLike[str]) -> None:
        """Write the measurements of all encoders to one file, for `wrap(model, capture=Capture(warmup=path))`.

        It has a section for each tower, as `GraphedEncoder.save_warmup` writes one. Without a tower nothing is written.
        """
        if sections := [one for encoder in self.values() for one in encoder.warmup_sections()]:
            write_sections(path, sections)

    def report(self, path: str | os.PathLike[str] | None = None, *, detail: bool = False) -> str:
        """Return how each tower was understood, what ran eager and why, and the report of each encoder.

        With a path, such as `"report.html"`, it is also written there as a page with figures. `detail` is as in
        `GraphedEncoder.report`.
        """
        eager, lines, sections = self._report_of_eager(), list[str](), list[Section]()
        for place, one in self.items():
            title, text = self._title(place), one.report(detail=detail)
            lines += [title, *(f"  {line}" for line in text.splitlines())]
            sections.append(Section(title, text, one.costs, one.stats))
        if path is not None:
            Path(path).write_text(page("The towers of a model", sections, "\n".join(eager)), encoding="utf-8")
        return "\n".join(lines + eager) or "no tower is wrapped"

    def _title(self, path: str) -> str:
        name = type(self[path].module).__name__
        return f"{path or name}: {name}, graphed by {self.how[path]}"

    def _report_of_eager(self) -> list[str]:
        lines = []
        for path, reason in self.eager.items():
            lines.append(f"{path or 'the model itself'}: eager, {reason}")
            if path in self.stats:
                lines += [f"  {counted(count, 'call')}: {why}" for why, count in self.stats[path].eager.items()]
        return lines
