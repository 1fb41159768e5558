"""The benchmarks: their traces, tables and checks, and what of them runs on a CPU."""

import importlib
import json
import math
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import common, deployment, metadata, page, qwen3_vl
from benchmarks.traces import SINGLES, TRACES, rows_of, trace

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text())

BOUNDS = {
    "mix1": (range(1, 2), range(1, 2), 1344),
    "mix4": (range(1, 7), range(1, 2), 1344),
    "video": (range(1, 2), range(4, 17), 448),
    "eight": (range(8, 9), range(1, 2), 448),
    "burst": (range(32, 33), range(1, 2), 448),
}
"""Items of a call, frames of an item, and the side of the largest square, by trace."""


@pytest.mark.parametrize("name", TRACES)
@given(seed=st.integers(0, 1000))
def test_a_trace_keeps_to_its_bounds(name, seed):
    counts, frames, largest = BOUNDS[name]
    for layout in trace(name, 8, seed):
        assert len(layout) in counts
        for t, h, w in layout:
            assert t in frames
            assert h % 2 == w % 2 == 0
            assert 14**2 <= h * w <= (largest // 16) ** 2
            assert max(h, w) <= 2 * min(h, w)


@pytest.mark.parametrize("name", TRACES)
def test_the_layouts_of_a_trace_are_all_different(name):
    assert len(set(trace(name, 200))) == 200


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_is_that_of_its_seed(name):
    assert trace(name, 20, seed=3) == trace(name, 20, seed=3)
    assert trace(name, 20, seed=3) == trace(name, 40, seed=3)[:20]
    assert trace(name, 20, seed=3) != trace(name, 20, seed=4)


def test_mixed_areas_are_log_uniform():
    areas = [rows_of(trace("mix1", 1, seed)[0]) for seed in range(400)]
    middle = math.sqrt(14**2 * 84**2)
    assert 0.4 < sum(area < middle for area in areas) / len(areas) < 0.6


def test_single_sizes_have_the_rows_of_their_pixels():
    assert [rows_of(SINGLES[name]) for name in ("224x224", "1344x1344")] == [196, 7056]
    assert rows_of(SINGLES["4 of 448x448"]) == 4 * 784
    assert rows_of(SINGLES["4 frames of 224x224"]) == 4 * 196


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_needs_no_gpu(name, monkeypatch, capsys):
    if name == "plots":
        pytest.importorskip("matplotlib")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(f"benchmarks.{name}").main()
    assert "--json" in capsys.readouterr().out or name in ("plots", "generic", "doctor", "load")


@pytest.mark.parametrize("rows", metadata.BUDGETS[:3])
def test_the_metadata_that_is_timed_is_right(rows):
    for work in (metadata.work, metadata.extra_work):
        for _, kernel, reference in work(rows, "cpu"):
            metadata.check_one(kernel, reference)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.0, 1)])
def test_percentiles(share, expected):
    assert common.percentile(list(range(1, 101)), share) == expected


def test_a_result_that_is_too_far_off_is_not_timed():
    common.check(1.4e-2, eager_error=1e-2)
    common.check(0.9e-3, eager_error=0.0)
    for error, eager_error in [(1.6e-2, 1e-2), (5.1e-2, 5e-2), (math.inf, 1e-2), (math.nan, 1e-2)]:
        with pytest.raises(common.WrongResultError, match="not timed"):
            common.check(error, eager_error)


def test_json_keeps_lists_of_numbers_on_one_line(tmp_path):
    path = tmp_path / "result.json"
    result = {"rows": [{"wall_ms": [1.0, 2.5, 1e-7], "name": "a"}], "empty": [], "list": [1, 2]}
    common.write_json(path, result)
    assert json.loads(path.read_text()) == result
    assert '"wall_ms": [ 1.0, 2.5, 1e-07 ]' in path.read_text()


def test_a_table_is_aligned_markdown():
    lines = common.table(("input", "ms"), [("a", 1.234), ("longer", None), ("b", 12)]).splitlines()
    assert lines == [
        "| input  |   ms |",
        "| ------ | ---- |",
        "| a      | 1.23 |",
        "| longer |    - |",
        "| b      |   12 |",
    ]


def test_systems_are_compared_on_the_layouts_they_share():
    rows = {("ours", "mix1"): {"wall_ms": [2.0, 4.0, 90.0]}, ("oracle_core", "mix1"): {"wall_ms": [2.0, 2.0]}}
    assert qwen3_vl.ratio(rows, "mix1", "ours", "oracle_core") == 1.5
    assert qwen3_vl.ratio(rows, "mix1", "ours", "eager_sdpa") is None


def test_a_table_shows_medians_of_singles_and_means_over_the_layouts_that_all_systems_share():
    rows = [
        {"system": "ours", "input": "224x224", "wall_ms": [1.0, 2.0, 9.0]},
        {"system": "ours", "input": "mix1", "wall_ms": [1.0, 3.0, 90.0]},
        {"system": "eager_varlen", "input": "mix1", "wall_ms": [5.0, 7.0]},
        {"system": "eager_sdpa", "input": "mix1", "wall_ms": [4.0, 4.0]},
        {"system": "compile_dynamic", "input": "mix1", "failed": "no time left"},
    ]
    assert page.milliseconds({"rows": rows}, "224x224") == {"ours": 2.0}
    times = page.milliseconds({"rows": rows}, "mix1")
    assert times == {"ours": 2.0, "eager_varlen": 6.0, "eager_sdpa": 4.0}
    assert page.eager(times) == 4.0


def test_a_failed_system_is_reported_beside_the_others():
    timed = {"system": "eager_sdpa", "input": "224x224", "wall_ms": [3.0, 1.0, 2.0]}
    failed = {"system": "compile_dynamic", "input": "all", "failed": "ValueError: no"}
    text = qwen3_vl.report({"tower": "8b", "inputs": {"224x224": [196]}, "systems": {}, "rows": [timed, failed]})
    assert "| 224x224 |       2.00 |" in text
    assert "failed: ValueError: no" in text


@pytest.mark.parametrize("shared", [True, False])
def test_the_service_that_is_timed_answers_on_the_tape(shared):
    took = deployment.service(shared, True, time.time())
    assert took["graphs"] == 6
    assert took["pools_gib"] == 0 < took["beside_gib"]  # tapes share no memory
    assert took["start_s"] > took["qwen3_vl_s"] + took["siglip_s"] + took["bert_s"]


def test_the_replicas_that_are_timed_answer_alike():
    rates = deployment.replicas(True, 0.1, {})
    assert rates["alone_per_s"] > 0
    assert rates["together_per_s"] == sum(rates["each_per_s"])
    assert rates["distance"] < 1e-6


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "there is no nvidia-cuda-mps-control"),
        ("echo no permission; exit 1", "the daemon did not start: no permission"),
        ("exit 0", "a process could not use it: .*(CUDA|NVIDIA)"),
    ],
)
def test_a_service_that_cannot_be_started_says_why(script, reason, tmp_path, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("processes can use the GPU")
    if script is not None:
        control = tmp_path / "nvidia-cuda-mps-control"
        control.write_text(f"#!/bin/sh\n{script}\n")
        control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    with pytest.raises(deployment.NoMpsError, match=reason), deployment.mps():
        pass
