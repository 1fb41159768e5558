"""`varlen_graphs.demo`: the command that compares a tower with its graphs, its report and its pictures."""

import io
import json
from contextlib import redirect_stdout
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from PIL import Image

import varlen_graphs as vg
from varlen_graphs.__main__ import main
from varlen_graphs.demo import run
from varlen_graphs.demo.inputs import Sample, load_samples, make_samples


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What the demo writes and prints, run once through the real processors."""
    folder, printed = tmp_path_factory.mktemp("demo"), io.StringIO()
    files = ["--json", str(folder / "a.json"), "--save-inputs", str(folder / "a.pt")]
    files += ["--picture", str(folder / "a.png")] if find_spec("matplotlib") else []
    with redirect_stdout(printed):
        assert main(["demo", "--device", "cpu", *files]) == 0
    return json.loads((folder / "a.json").read_text()), folder / "a.pt", folder / "a.png", printed.getvalue()


def test_the_demo_agrees_and_reports_every_call(saved):
    report = saved[0]
    assert report["agree"]
    assert len(report["calls"]) == 7
    assert all(call["error"] <= 1e-5 and call["budget"] >= call["rows"] for call in report["calls"])
    assert any("clip" in call["call"] for call in report["calls"])


def test_the_demo_runs_from_preprocessed_inputs(saved, tmp_path, capsys):
    report, inputs, *_ = saved
    samples = load_samples(inputs)
    assert [sample.pixel_values.shape[0] for sample in samples] == [call["rows"] for call in report["calls"]]
    few = tmp_path / "few.pt"
    run.save_samples(samples[:1], few)
    assert main(["demo", "--device", "cpu", "--inputs", str(few)]) == 0
    printed = capsys.readouterr().out
    assert "error" in printed
    assert printed.strip().splitlines()[-1].startswith("all calls agree with eager: relative L2 at most")


def test_the_demo_draws_its_errors(saved):
    figure = pytest.importorskip("varlen_graphs.demo.figure", exc_type=ImportError)
    _, _, picture, printed = saved
    assert f"drawn in {picture}" in printed
    assert coloured(picture, figure.GRAPHED) > 10_000


def test_the_picture_on_a_gpu_compares_times(tmp_path):
    figure = pytest.importorskip("varlen_graphs.demo.figure", exc_type=ImportError)
    figure.draw_times(tmp_path / "times.png", "Times", {"one": (20.0, 5.0), "other": (10.0, 5.0)})
    eager, graphed = (coloured(tmp_path / "times.png", colour) for colour in (figure.EAGER, figure.GRAPHED))
    assert eager / graphed == pytest.approx(3.0, rel=0.1)


def coloured(path, colour):
    """Return the number of pixels of a colour."""
    with Image.open(path) as opened:
        pixels = np.asarray(opened.convert("RGB"))
    return (pixels == [int(colour[at : at + 2], 16) for at in (1, 3, 5)]).all(-1).sum()


def test_the_demo_fails_when_calls_disagree(saved, tmp_path, monkeypatch, capsys):
    few = tmp_path / "few.pt"
    run.save_samples(load_samples(saved[1])[:1], few)
    monkeypatch.setattr(run, "EXACT", 0.0)
    assert main(["demo", "--device", "cpu", "--inputs", str(few)]) == 1
    assert "NOT all calls agree" in capsys.readouterr().out


def test_the_demo_fails_when_nothing_was_replayed(saved, tmp_path, monkeypatch, capsys):
    few, none = tmp_path / "few.pt", tmp_path / "none.pt"
    run.save_samples(load_samples(saved[1])[:1], few)
    run.save_samples([], none)
    assert main(["demo", "--device", "cpu", "--inputs", str(none)]) == 1
    assert "holds no samples" in capsys.readouterr().out
    replay = vg.GraphedEncoder.__call__
    monkeypatch.setattr(vg.GraphedEncoder, "__call__", vg.GraphedEncoder.eager)
    assert main(["demo", "--device", "cpu", "--inputs", str(few)]) == 1
    monkeypatch.setattr(vg.GraphedEncoder, "__call__", replay)
    assert "NOT all calls agree" in capsys.readouterr().out


def test_a_clip_is_stacked_from_frames_as_the_video_processor_does():
    """Without torchvision: two frames fill the temporal slots of a patch, so no slot repeats its neighbour."""
    samples, origin = make_samples(large=False)
    clip = next(sample for sample in samples if sample.name.startswith("clip"))
    assert clip.grid_thw.tolist() == [[4, 14, 14]]
    assert clip.pixel_values.shape == (4 * 14 * 14, 3 * 2 * 16 * 16)
    first, second = clip.pixel_values.unflatten(1, (3, 2, -1)).unbind(2)
    assert not torch.equal(first, second)
    assert "Qwen2VLImageProcessor" in origin
    assert isinstance(clip, Sample)
