"""One warm-up file for all towers of a model."""

import json

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import UNVERIFIED
from tests.support.towers import pixels, qwen2_tower, qwen3_vl_tower

SMALL, LARGE = [(1, 8, 8)], [(1, 16, 12)]
BUDGETS = [128, 256, 384]


class Model(nn.Module):
    """Two towers that are equal but for their weights, and another one."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.other = qwen3_vl_tower(), qwen3_vl_tower(), qwen2_tower()


def wrapped(path, model=None, **options):
    capture = vg.options.Capture(lazy=True, warmup=path, **options)
    return vg.wrap(Model() if model is None else model, BUDGETS, backend="tape", capture=capture, verify=UNVERIFIED)


def rows(encoder):
    """The rows of what an earlier run used, as far as a new one knows."""
    return [budget.rows for budget in encoder.capture_pending(None)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The file of a run whose towers had calls of other sizes."""
    path = tmp_path_factory.mktemp("saved") / "warm.json"
    model = vg.wrap(Model(), BUDGETS, backend="tape", verify=UNVERIFIED)
    with torch.no_grad():
        for name, grid in (("left", SMALL), ("right", LARGE), ("other", LARGE)):
            getattr(model, name)(pixels(grid), grid_thw=torch.tensor(grid))
    vg.encoders(model).save_warmup(path)
    return path.read_text()


@pytest.fixture
def path(saved, tmp_path):
    (tmp_path / "warm.json").write_text(saved)
    return tmp_path / "warm.json"


def test_a_model_has_one_warmup_file_with_a_section_for_each_tower(path):
    assert [one["name"] for one in json.loads(path.read_text())["encoders"]] == ["left", "right", "other"]
    again = vg.encoders(wrapped(path))
    assert {name: rows(encoder) for name, encoder in again.items()} == {"left": [128], "right": [256], "other": [256]}


def test_towers_may_be_saved_one_by_one(path):
    alone, model = path.with_name("alone.json"), wrapped(None)
    for name, grid in (("left", LARGE), ("right", SMALL)):
        for _ in range(2):
            getattr(model, name)(pixels(grid), grid_thw=torch.tensor(grid))
            vg.encoders(model)[name].capture_pending(None)
        for file in (path, alone):
            vg.encoders(model)[name].save_warmup(file)
    assert {name: rows(one) for name, one in vg.encoders(wrapped(path)).items()} == {
        "left": [256], "right": [128], "other": [256],
    }  # fmt: skip
    with pytest.warns(
        UserWarning, match="alone.json has nothing of other, but of 'left, right'. It is ignored"
    ) as told:
        again = vg.encoders(wrapped(alone))
    assert {name: rows(one) for name, one in again.items()} == {"left": [256], "right": [128], "other": []}
    assert len(told) == 1  # what tries out a tower reads no file


def test_a_file_is_found_by_what_an_encoder_is_where_it_has_another_name(path):
    """A tower alone reads the file of its model, and a model that of a tower alone."""
    tower = qwen2_tower()
    assert rows(vg.encoders(wrapped(path, tower))[""]) == [256]
    alone = path.with_name("alone.json")
    tower = vg.wrap(qwen2_tower(), BUDGETS, backend="tape", verify=UNVERIFIED)
    tower(pixels(SMALL), grid_thw=torch.tensor(SMALL))
    vg.encoders(tower).save_warmup(alone)
    with pytest.warns(UserWarning, match="was written for another setup: module is .*Qwen2.*, not .*Qwen3"):
        again = vg.encoders(wrapped(alone))
    assert rows(again["other"]) == [128]


def test_a_damaged_file_of_a_model_stops_no_start_unless_asked(path):
    path.write_text(path.read_text()[:100])
    with pytest.warns(UserWarning, match="warm.json is not a warm-up file.* It is ignored"):
        assert not rows(vg.encoders(wrapped(path))["left"])
    model = wrapped(path, on_bad_warmup="error")
    with pytest.raises(vg.errors.InputError, match=r"warm.json is not a warm-up file"):
        vg.encoders(model)


def test_without_a_tower_nothing_is_written(tmp_path):
    vg.encoders(nn.Linear(2, 2)).save_warmup(tmp_path / "warm.json")
    assert not [*tmp_path.iterdir()]
