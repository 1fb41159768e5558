"""`SingleReplay`: calls that take the short way are as others in every respect."""

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support.encoders import ON_GPU, attention_encoder, rows_for
from tests.support.towers import equal_bits, pixels, qwen3_vl_tower, tensors


@pytest.fixture(scope="module")
def encoders():
    """Two encoders of one module, the second of which asks the user at each call, so that no call is plain."""
    plain = attention_encoder([32, 96, 192], layouts="reported")
    return plain, attention_encoder([32, 96, 192], plain.module, layouts="reported", eager_if=lambda module: None)


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any),
    by_position=st.booleans(),
    form=st.sampled_from([list, tuple, torch.tensor]),
)
def test_outputs_and_counts_are_those_of_other_calls(encoders, lengths, by_position, form):
    rows, before = rows_for(lengths), [one.stats.calls for one in encoders]
    described = form(lengths)
    outputs = [one(rows, lengths=described) if by_position else one(x=rows, lengths=described) for one in encoders]
    assert equal_bits(*outputs)
    plain, other = (one.stats for one in encoders)
    assert (plain.calls, plain.items, plain.rows, plain.padding) == (
        other.calls,
        other.items,
        other.rows,
        other.padding,
    )
    assert (plain.replays, plain.active, plain.eager) == (other.replays, other.active, other.eager)
    assert [one.stats.calls for one in encoders] == [count + 1 for count in before]


@pytest.fixture(scope="module")
def unseen():
    """The same for items that only the device sees."""
    plain = attention_encoder([32, 96, 192], layouts=ON_GPU)
    return plain, attention_encoder([32, 96, 192], plain.module, layouts=ON_GPU, eager_if=lambda module: None)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=9),
    error=st.sampled_from([0, 0, 0, 1, -1]),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.uint8]),
)
def test_items_on_the_device_give_what_they_give_in_other_calls(unseen, lengths, error, dtype):
    rows, outputs, wrong = rows_for([*lengths, 1]), [], []
    described = torch.tensor([*lengths[:-1], lengths[-1] + 1 + error], dtype=dtype)
    for encoder in unseen:
        try:
            outputs.append(encoder(rows, lengths=described))
        except vg.errors.LayoutError as raised:  # of more items than some budget takes unseen
            outputs.append(torch.tensor([len(str(raised))]))
        wrong.append(encoder.stats.wrong_layouts)
    torch.testing.assert_close(*outputs, rtol=0, atol=0, equal_nan=True)
    plain, other = (one.stats for one in unseen)
    assert (plain.calls, plain.items, plain.replays, plain.active, plain.eager, plain.padding) == (
        other.calls,
        other.items,
        other.replays,
        other.active,
        other.eager,
        other.padding,
    )
    assert wrong[0] == wrong[1]


def test_wrong_items_on_the_device_are_told_and_harm_no_other_call(unseen):
    encoder, rows = unseen[0], rows_for([5, 7])
    right = encoder(rows, lengths=torch.tensor([5, 7]))
    before = encoder.stats.wrong_layouts
    assert encoder(rows, lengths=torch.tensor([5, 9])).isnan().all()
    assert equal_bits(encoder(rows, lengths=torch.tensor([5, 7])), right)
    assert encoder.stats.wrong_layouts == before + 1
    with pytest.raises(vg.errors.LayoutError, match="describes more rows"):
        encoder.check()


WRONG = {
    "too few rows": lambda rows: ((rows[:-1],), {"lengths": [5, 7]}),
    "a length below 0": lambda rows: ((rows,), {"lengths": [13, -1]}),
    "a length that is no number": lambda rows: ((rows,), {"lengths": [5, "7"]}),
    "a truth value": lambda rows: ((rows,), {"lengths": [11, True]}),
    "a tensor of floats": lambda rows: ((rows,), {"lengths": torch.tensor([5.0, 7.0])}),
    "a tensor of more numbers than rows": lambda rows: (
        (rows,),
        {"lengths": torch.zeros(1, dtype=torch.long).expand(10**9)},
    ),
    "a tensor that was freed": lambda rows: ((rows,), {"lengths": freed(torch.tensor([5, 7]))}),
    "a sparse tensor": lambda rows: ((rows,), {"lengths": torch.tensor([5, 7]).to_sparse()}),
    "a number": lambda rows: ((rows,), {"lengths": torch.tensor(12)}),
    "no items": lambda rows: ((rows[:0],), {"lengths": []}),
    "other rows": lambda rows: ((rows[:, :-1],), {"lengths": [5, 7]}),
    "another dtype": lambda rows: ((rows.long(),), {"lengths": [5, 7]}),
    "sparse rows": lambda rows: ((rows.to_sparse(),), {"lengths": [5, 7]}),
    "an argument twice": lambda rows: ((rows,), {"x": rows}),
    "an unknown argument": lambda rows: ((rows,), {"length": [5, 7]}),
    "rows that were freed": lambda rows: ((freed(rows),), {"lengths": [5, 7]}),
}


def freed(rows):
    rows = rows.clone()
    rows.untyped_storage().resize_(0)
    return rows


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_errors_are_those_of_other_calls(encoders, wrong):
    messages = []
    for encoder in encoders:
        encoder(rows_for([5, 7]), lengths=[5, 7])
        args, kwargs = wrong(rows_for([5, 7]))
        with pytest.raises(vg.errors.VarlenGraphsError) as error:
            encoder(*args, **kwargs)
        messages.append(f"{type(error.value).__name__}: {error.value}")
    assert messages[0] == messages[1]


FORMS = {
    "in float64": lambda rows: rows.double(),
    "with gaps": lambda rows: torch.cat([rows, rows], 1)[:, :8],
    "negative by a bit": lambda rows: torch._neg_view(-rows),
    "off the unit of copies": lambda rows: torch.cat([rows.new_zeros(1), rows.flatten()])[1:].view(rows.shape),
    "a parameter": lambda rows: torch.nn.Parameter(rows, requires_grad=False),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_rows_in_any_form_give_the_same(encoders, form):
    rows = rows_for([5, 7])
    expected = encoders[0](rows, lengths=[5, 7])
    for encoder in encoders:
        assert torch.allclose(encoder(form(rows), lengths=[5, 7]), expected, atol=1e-6)


def test_gradients_come_from_the_module_itself(encoders):
    encoder = encoders[0]
    with torch.enable_grad():
        rows = rows_for([5, 7]).requires_grad_()
        encoder(rows, lengths=[5, 7]).sum().backward()
    assert rows.grad.abs().sum() > 0


def test_padding_that_was_poisoned_is_cleared_for_later_calls(encoders):
    encoder, rows = encoders[0], rows_for([5, 7])
    expected = encoder(rows, lengths=[5, 7])
    for _ in range(3):
        encoder.poison()
        assert equal_bits(encoder(rows, lengths=[5, 7]), expected)


def test_a_grid_is_answered_by_fields_of_the_output():
    tower = qwen3_vl_tower(depth=2, deepstack_visual_indexes=[0])
    plain, other = (
        vg.recipes.qwen3_vl(tower, [64, 128], backend="tape", eager_if=asks) for asks in (None, lambda module: None)
    )
    for grid in ([(1, 4, 6)], [[1, 8, 4], [2, 2, 2]], [(1, 4, 6), [1, 8, 4]], [(3, 4, 8)]):
        rows = pixels(grid)
        ours, theirs = (tensors(one(rows, grid_thw=grid)) for one in (plain, other))
        assert ours.keys() == theirs.keys()
        assert all(equal_bits(ours[name], theirs[name]) for name in ours)
    assert plain.stats.replays == other.stats.replays


class Halves(vg.Lengths):
    """Lengths that count pairs of rows."""

    def parse(self, value):
        return [(1, 1, 2 * length) for _, _, length in super().parse(value)]


def test_a_layout_of_ones_own_reads_its_items_itself():
    module = torch.nn.Linear(8, 8).eval()
    encoder = vg.GraphedEncoder(
        module, [32], vg.BufferSpec(vg.inputs.Rows("input", shape=(8,)), Halves()), backend="tape"
    )
    for _ in range(3):
        assert encoder(rows_for([10]), lengths=[2, 3]).shape == (10, 8)
    assert encoder.stats.items == 6


def test_released_graphs_keep_no_memory():
    encoder, rows = attention_encoder([32], layouts="reported"), rows_for([5])
    for _ in range(3):
        encoder(rows, lengths=[5])
    arena = weakref.ref(encoder.executor.store.arena)
    encoder.release()
    gc.collect()
    assert arena() is None
