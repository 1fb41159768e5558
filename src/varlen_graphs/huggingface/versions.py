"""The versions of transformers that this release was run with."""

import logging
import re
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version

LOGGER = logging.getLogger("varlen_graphs")

OLDEST, NEWEST = "4.57", "5.24"
"""Releases from and up to which the tests were run."""


def note_version() -> None:
    """Log once in a process, at WARNING, that transformers is in use in a version older or newer than what was run."""
    if "transformers" in sys.modules:
        with suppress(PackageNotFoundError):
            _note(version("transformers"))


@cache  # once
def _note(found: str) -> None:
    if not _release(OLDEST) <= _release(found) <= _release(NEWEST):
        LOGGER.warning(
            "this release of varlen_graphs was run with transformers %s to %s, and this is %s: graphs are compared "
            "with the model as always, and what cannot be graphed runs eager",
            OLDEST,
            NEWEST,
            found,
        )


def _release(text: str) -> list[int]:
    """Return the first two numbers of a version."""
    return [*map(int, re.findall(r"\d+", text)[:2])]
