"""What fails as yet, by `fails_as_yet.txt`, is expected to; whatever passes of it may."""

from pathlib import Path

import pytest

FAILS_AS_YET = set(Path(__file__).with_name("fails_as_yet.txt").read_text().splitlines())


def pytest_collection_modifyitems(items):
    for item in items:
        if f"{item.path.name}::{item.name}" in FAILS_AS_YET:
            item.add_marker(pytest.mark.xfail(strict=False, reason="captures run the module itself"))
