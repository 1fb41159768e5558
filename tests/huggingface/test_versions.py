"""`huggingface.versions`: the log says once that transformers is in use in a version that was not run."""

import logging

import pytest
import transformers
from torch import nn

import varlen_graphs as vg
from varlen_graphs.huggingface import versions


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ("4.56.2", True),
        ("4.57.6", False),
        ("5.0.0rc3", False),
        ("4.57rc1", False),
        ("5.25rc1", True),
        ("5.24.1", False),
        ("5.25.0.dev0", True),
        ("6.0", True),
    ],
)
def test_a_version_that_was_not_run_is_named_once(found, named, monkeypatch, caplog):
    monkeypatch.setattr(versions, "version", lambda package: found)
    with caplog.at_level(logging.WARNING, logger="varlen_graphs"):
        for _ in range(2):
            with pytest.raises(vg.errors.SpecError):
                vg.wrap(nn.ModuleList())
    lines = [record.getMessage() for record in caplog.records if "transformers" in record.getMessage()]
    assert len(lines) == named
    assert all(found in line for line in lines)


def test_the_installed_version_is_one_of_those():
    oldest, newest = (tuple(map(int, one.split("."))) for one in (versions.OLDEST, versions.NEWEST))
    assert oldest <= tuple(map(int, transformers.__version__.split(".")[:2])) <= newest
