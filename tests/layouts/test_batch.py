"""`Batch`: items of one size, which nothing else describes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.support.batches import SPEC, FixedSize, check_batch_contract, images
from tests.support.encoders import UNVERIFIED
from tests.support.towers import distance, equal_bits
from varlen_graphs.graphs.store import MOST_SETS


def encoder_of_batches(budgets=(1, 2, 4, 8), spec=SPEC, module=None, **options):
    return vg.GraphedEncoder(module or FixedSize(), list(budgets), spec, **({"backend": "tape"} | options))


def test_the_padding_contract_holds():
    check_batch_contract(encoder_of_batches(verify=vg.options.Verify(strict=True)), "cpu")


def test_integers_are_batch_sizes():
    assert [budget.items for budget in encoder_of_batches([1, 2, 4, 8, 16]).budgets] == [1, 2, 4, 8, 16]
    assert encoder_of_batches([3]).budgets == (vg.budgets.Budget(3, items=3, segments=3, max_seqlen=1),)
    with pytest.raises(vg.errors.BudgetError, match="expected batch sizes for a Batch"):
        encoder_of_batches_with_a_ladder()


def encoder_of_batches_with_a_ladder():
    return vg.GraphedEncoder(FixedSize(), vg.Ladder(256, 512), SPEC, backend="tape")


@settings(max_examples=15)
@given(st.integers(1, 40), st.sampled_from([8, 12]))
def test_any_batch_of_any_resolution_gives_what_the_module_gives(count, side):
    x = images(count, side)
    assert distance(BATCHED(x), BATCHED.module(x)) < 1e-5


BATCHED = encoder_of_batches()


def test_resolutions_have_graphs_and_static_inputs_of_their_own():
    encoder = encoder_of_batches()
    large, small = images(3, 16), images(5, 8)
    first = encoder(large)
    for x in (small, large, small):
        encoder.poison()
        assert distance(encoder(x), encoder.module(x)) < 1e-5
    assert equal_bits(encoder(large), first)
    assert len(encoder.executor.store.sets) == 2
    verified = encoder.verify([{"pixel_values": images(3, 16)}, {"pixel_values": images(8, 8)}])
    assert verified.calls == 2
    encoder.release()
    assert distance(encoder(small), encoder.module(small)) < 1e-5


def test_ever_new_resolutions_run_eager_after_some():
    encoder = encoder_of_batches([2], verify=UNVERIFIED)

    def check(sides):
        for side in sides:
            x = images(2, side)
            assert distance(encoder(x), encoder.module(x)) < 1e-5

    check(range(4, 3 + MOST_SETS))
    with pytest.warns(UserWarning, match="its adapters, or the shape of its rows, changed. Such calls run eager"):
        check(range(3 + MOST_SETS, 7 + MOST_SETS))
    assert len(encoder.executor.store.sets) == MOST_SETS
    assert sum(encoder.stats.eager.values()) == 3


def test_a_declared_shape_is_the_only_one():
    spec = vg.BufferSpec(vg.inputs.Rows("pixel_values", (3, 8, 8)), vg.Batch(), outputs=SPEC.outputs)
    encoder = encoder_of_batches(spec=spec).capture()
    assert distance(encoder(images(5, 8)), encoder.module(images(5, 8))) < 1e-5
    with pytest.raises(vg.errors.InputError, match=r"pixel_values is \[2, 3, 16, 16\]: expected \[batch, 3, 8, 8\]"):
        encoder(images(2, 16))


def test_a_batch_may_be_staged_by_its_size():
    encoder, x = encoder_of_batches(), images(3, 8)
    expected = encoder(x)
    with encoder.stage(3) as stage:
        stage.rows.copy_(x)
    assert equal_bits(stage.output, expected)
    with pytest.raises(vg.errors.InputError, match="expected the number of items, an integer"), encoder.stage([3]):
        pass


def test_outputs_and_masks_that_a_batch_cannot_have_are_refused():
    with pytest.raises(vg.errors.SpecError, match=r"declare Rows\(\) or Items\(\) for an entry an item"):
        vg.BufferSpec("x", vg.Batch(), outputs=vg.outputs.Rows(every=4))
    with pytest.raises(vg.errors.SpecError, match="leave padded_by out"):
        vg.BufferSpec(vg.inputs.Rows("x", padded_by="mask"), vg.Batch())


def test_an_empty_batch_is_refused():
    with pytest.raises(vg.errors.LayoutError, match="the batch is empty"):
        encoder_of_batches()(images(0, 8))


def test_items_carry_tensors_and_columns():
    class Conditioned(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, timestep, kind):
            return self.linear(x) * timestep[:, None, None] + kind[:, None, None]

    spec = vg.BufferSpec(
        vg.inputs.Rows("x", (4, 8)),
        vg.Batch(columns=(vg.layouts.Column("kind"),)),
        inputs=[vg.inputs.PerItem("timestep")],
    )
    encoder = encoder_of_batches(spec=spec, module=Conditioned().eval(), verify=vg.options.Verify(strict=True))
    x, t, kinds = torch.randn(11, 4, 8), torch.rand(11), list(range(11))
    got = encoder(x, timestep=t, kind=kinds)
    assert distance(got, encoder.module(x, t, torch.tensor(kinds))) < 1e-5


class Mean(nn.Module):
    """Subtracts the mean of the batch."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, pixel_values):
        return {"patches": pixel_values * self.one - pixel_values.mean(0), "pooled": pixel_values.mean((1, 2, 3))}


def test_what_mixes_the_items_of_a_batch_fails_the_proof():
    encoder, x = encoder_of_batches(module=Mean().eval()), images(3, 8)
    with pytest.warns(UserWarning, match="failed verification"):
        got = encoder(x)
    assert distance(got, encoder.module(x)) < 1e-6
    assert not encoder.stats.replays


@pytest.mark.parametrize("declared", ["static", "input", "column"])
def test_an_argument_may_be_called_batch(declared):
    class Scaled(nn.Module):
        def forward(self, x, batch):
            return x * (batch if isinstance(batch, int) else batch[:, None])

    layout = vg.Batch(columns=(vg.layouts.Column("batch"),) * (declared == "column"))
    spec = vg.BufferSpec("x", layout, inputs=[vg.inputs.PerItem("batch")] * (declared == "input"))
    encoder = vg.GraphedEncoder(Scaled().eval(), [1, 2, 4], spec, backend="tape")
    batch = 3 if declared == "static" else [3, 3, 3]
    assert encoder(torch.ones(3, 1), batch=batch).tolist() == [[3.0]] * 3


def test_the_usual_resolution_is_captured_before_the_first_call():
    spec = vg.BufferSpec("pixel_values", vg.Batch(usual=(3, 16, 16)), outputs=SPEC.outputs)
    tower = FixedSize()
    encoder = vg.GraphedEncoder(tower, [1, 2, 4], spec, backend="tape").capture()
    assert len(encoder.executor.store) == 3
    for side in (16, 8):  # others may come
        assert distance(encoder(images(3, side)), tower(images(3, side))) < 1e-5
    assert not encoder.stats.eager


def test_the_usual_resolution_is_a_shape():
    with pytest.raises(vg.errors.SpecError, match=r"usual=\(3, -1\): expected the shape of one item"):
        vg.Batch(usual=(3, -1))


def test_arguments_that_the_module_ignores_may_come_or_not():
    class Takes(FixedSize):
        def forward(self, pixel_values, attention_mask=None):
            return super().forward(pixel_values)

    spec = vg.BufferSpec("pixel_values", vg.Batch(), outputs=SPEC.outputs, ignored=["attention_mask"])
    tower = Takes()
    encoder = vg.GraphedEncoder(tower, [1, 2, 4], spec, backend="tape")
    x, mask = images(3, 16), torch.ones(3, 7)
    for call in ((x,), (x, mask)):
        assert distance(encoder(*call), tower(*call)) < 1e-5
    assert distance(encoder(x, attention_mask=mask), tower(x)) < 1e-5
    assert not encoder.stats.eager
    with pytest.raises(vg.errors.SpecError, match="has no argument 'mask', but it is declared"):
        vg.GraphedEncoder(tower, [1], vg.BufferSpec("pixel_values", vg.Batch(), ignored=["mask"]))
