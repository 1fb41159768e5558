"""Modules that need so many rows of each item: declared, or told by the refusal."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.declared.points import ITEM, Neighbours
from tests.support.encoders import rows_for
from tests.support.towers import distance


def neighbours(module=None, **declared):
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths("lengths"), [ITEM], **declared)
    return vg.GraphedEncoder((module or Neighbours()).eval(), [64, 128], spec, backend="tape")


def alone(encoder, rows, lengths):
    return torch.cat([encoder.module(own, torch.zeros(len(own))) for own in rows.split(lengths)])


def test_items_of_enough_rows_replay_and_a_smaller_one_runs_eager():
    encoder = neighbours(min_rows=8)
    for lengths in ([20, 8], [9, 64, 30], [100]):
        rows = rows_for(lengths)
        assert distance(encoder(rows, lengths=lengths), alone(encoder, rows, lengths)) < 1e-5
    assert encoder.stats.replays.total() == 3
    out = encoder(rows_for([20, 7]), lengths=[20, 7])
    assert distance(out[:20], alone(encoder, rows_for([20, 7])[:20], [20])) < 1e-5
    assert out[20:].isnan().all()  # as the module itself answers
    assert encoder.stats.eager == {"an item of 7 rows, with min_rows=8": 1}
    with pytest.raises(RuntimeError, match="selected index k out of range"):  # the module's own error
        encoder(rows_for([5]), lengths=[5])
    with encoder.stage([20, 7]) as stage:
        stage.rows.copy_(rows_for([20, 7]))
    assert distance(stage.output[:20], out[:20]) < 1e-6
    with pytest.raises(vg.errors.InputError, match="calls run eager now \\(an item of 7 rows"):
        encoder.verify([{"x": rows_for([7]), "lengths": [7]}])
    encoder.verify([{"x": rows_for([20, 8]), "lengths": [20, 8]}])


def test_items_that_only_the_device_has_seen_are_read():
    encoder = neighbours(min_rows=8)
    lengths = torch.tensor([20, 7])
    assert encoder(rows_for([20, 7]), lengths=lengths)[20:].isnan().all()
    assert encoder.stats.eager == {"an item of 7 rows, with min_rows=8": 1}


def test_the_refusal_says_what_to_declare():
    class Mixes(Neighbours):
        """Takes rows of others where its own are too few."""

        def forward(self, x, item):
            far = torch.cdist(x, x).masked_fill(item[:, None] != item, 1e9)
            return self.linear(x[far.topk(8, largest=False).indices].mean(1))

    encoder = neighbours(Mixes())
    with pytest.warns(UserWarning, match=r"fewer than 8 rows were wrong.*declare BufferSpec\(..., min_rows=8\)"):
        encoder(rows_for([20]), lengths=[20])
    declared = neighbours(Mixes(), min_rows=8)
    declared(rows_for([20]), lengths=[20])
    assert declared.stats.replays.total() == 1


def test_grids_count_the_rows_of_all_frames():
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.GridTHW(), [ITEM], min_rows=8)
    encoder = vg.GraphedEncoder(Neighbours().eval(), [64], spec, backend="tape")
    encoder(rows_for([8, 12]), grid_thw=[(2, 2, 2), (1, 3, 4)])
    assert encoder.stats.replays.total() == 1


@pytest.mark.parametrize("min_rows", [0, -1, 1.5, "8"])
def test_a_number_that_is_none_is_an_error(min_rows):
    with pytest.raises(vg.errors.SpecError, match=r"min_rows=.*expected an integer of at least 1"):
        vg.BufferSpec("x", vg.Lengths(), min_rows=min_rows)


def test_batches_and_budgets_that_cannot_have_it_are_errors():
    with pytest.raises(vg.errors.SpecError, match="min_rows=8 with Mask: expected packed rows"):
        vg.BufferSpec("x", vg.Mask("mask"), min_rows=8)
    with pytest.raises(vg.errors.BudgetError, match=r"no item could use .*the smallest item has 200 rows"):
        neighbours(min_rows=200)
