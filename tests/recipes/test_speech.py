"""Speech encoders of transformers with clips of any length: graphed as they are, each clip alone, or refused by name."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import varlen_graphs as vg

pytest.importorskip("transformers", minversion="5.20", reason="needs the masks of transformers 5")

from tests.support.speech_models import (
    ALONE,
    RAGGED,
    SQUEEZED,
    check_clips,
    check_squeezed,
    clips,
    error_of,
    mask_of,
    speech_encoder,
    speech_model,
)


@pytest.fixture(scope="module")
def shared():
    """Captured once, for all examples of a property."""
    return speech_encoder("wav2vec2 large")


def test_graphs_of_several_budgets_keep_the_padding_contract(shared):
    check_clips(shared)


@pytest.mark.parametrize("name", [*RAGGED, *ALONE])
def test_models_are_told_apart_by_whether_padding_reaches_real_frames(name):
    assert speech_encoder(name, backend="eager").alone == (name in ALONE)  # the recipe compares it with the model


@pytest.mark.parametrize("name", SQUEEZED)
def test_models_that_squeeze_frames(name):
    check_squeezed(speech_encoder(name))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(30, 400), min_size=1, max_size=9), st.integers(0, 60), st.integers(0, 9))
def test_any_batch_of_clips_is_as_the_model_has_it(shared, lengths, longer, seed):
    call = clips(shared, lengths, seed=seed, longer=longer)
    with torch.no_grad():
        expected = shared.module(**call)
    out = shared(**clips(shared, lengths, torch.nan, seed, longer))
    assert error_of(shared, out, expected, lengths) < 1e-5


@pytest.mark.parametrize(("name", "lengths"), [("gemma 4", [200, 77]), ("moonshine", [3000] * 2)])
def test_masks_in_an_output_have_the_dtype_of_that_of_the_call(name, lengths):
    encoder = speech_encoder(name, proven=False)
    call, mask = clips(encoder, lengths), mask_of(encoder)
    for calls, dtype in enumerate((torch.bool, torch.int64, torch.int32), start=1):
        call[mask] = call[mask].to(dtype)
        out, expected = encoder(**call), encoder.module(**call)
        assert encoder.stats.replays.total() == calls
        assert {name: part.dtype for name, part in out.items()} == {name: part.dtype for name, part in expected.items()}


def test_calls_with_a_mask_of_ones_that_run_eager_keep_it():
    encoder = speech_encoder("moonshine", proven=False)
    call = clips(encoder, [3000] * 2)
    handle = encoder.module.layers[0].register_forward_hook(lambda *_: None)
    with torch.no_grad():
        assert [*encoder(**call)] == [*encoder.module(**call)]
        assert len(encoder(**call, return_dict=False)) == len(encoder.module(**call, return_dict=False)) == 2
    handle.remove()
    assert encoder.stats.eager == {"forward hooks": 1, "return_dict=False": 1}


def test_verify_proves_calls(shared):
    assert shared.verify([clips(shared, [300, 60, 91])]).calls == 1


def test_clips_too_short_for_a_frame_have_none(shared):
    call = clips(shared, [200, 3, 60])
    out = shared(**call).last_hidden_state
    assert not out[1].any()
    with torch.no_grad():
        alone = shared.module(call["input_values"][:1]).last_hidden_state
    torch.testing.assert_close(out[:1], alone)


def eager_reason(encoder, **call):
    """Return the reason why a call runs eager; checks that the model itself answers it."""
    encoder.stats.eager.clear()
    with torch.no_grad():
        expected = encoder.module(**call)
    torch.testing.assert_close(encoder(**call).last_hidden_state, expected.last_hidden_state)
    (reason,) = encoder.stats.eager
    return reason


def test_masks_that_graphs_do_not_take_run_the_model_itself(shared):
    call = clips(shared, [200, 90])
    holes = call["attention_mask"].flip(1)
    assert "does not mark the first rows" in eager_reason(shared, **call | {"attention_mask": holes})
    assert "does not mark the first rows" in eager_reason(shared, **call | {"attention_mask": holes.float()})
    shared.stats.eager.clear()
    for mask in (call["attention_mask"].bool(), call["attention_mask"].long()):
        assert torch.equal(shared(call["input_values"], mask)[0], shared(**call)[0])
    assert not shared.stats.eager
    assert shared(**call, output_attentions=True).attentions is not None
    with pytest.raises(vg.errors.InputError, match="mask_time_indices"):
        shared(**call, mask_time_indices=torch.zeros(2, 10, dtype=torch.bool))


def test_a_model_that_lets_padding_reach_real_frames_takes_a_mask_of_ones_and_runs_others_itself():
    encoder = speech_encoder("wav2vec2 base", proven=False)
    check_clips(encoder)
    whole = clips(encoder, [200, 200])
    with torch.no_grad():
        expected = encoder.module(**whole)
    assert error_of(encoder, encoder(**whole), expected, [200, 200]) < 1e-5
    assert not encoder.stats.eager
    assert "several lengths" in eager_reason(encoder, **clips(encoder, [200, 90]))
    with pytest.raises(AttributeError, match="list"):  # the model's own
        encoder(whole["input_values"], attention_mask=[[1] * 200] * 2)


def test_attention_that_sees_padding_is_kept_from_it_in_blocks_of_frames():
    encoder = speech_encoder("granite 3", proven=False)  # whose blocks have 24 frames
    check_clips(encoder)
    with pytest.raises(vg.errors.InputError, match="unknown argument 'clip_mask'"):
        encoder(torch.zeros(1, 30, 160), clip_mask=torch.ones(1, 30))


def test_a_tower_that_returns_a_tensor_and_requires_its_mask():
    encoder = speech_encoder("phi 4", proven=False)
    check_clips(encoder)
    encoder(**clips(encoder, [200, 90]))
    assert encoder.stats.eager == {"mask of clips of several lengths": 1}


def test_a_tower_that_cuts_long_clips_refuses_budgets_of_these():
    encoder = vg.recipes.speech(speech_model("phi 4"), [vg.budgets.Budget.padded(1, 4200)], backend="tape")
    with pytest.raises(vg.errors.SpecError, match="sees 2 blocks of 1 clips of 500 frames: expected whole clips"):
        encoder.capture()


@pytest.mark.parametrize("name", ["wav2vec2 base", "wav2vec2 large"])
def test_arguments_that_the_tower_does_not_take_raise(name):
    encoder = speech_encoder(name, backend="eager")
    batch = torch.zeros(1, 100)
    with pytest.raises(vg.errors.InputError, match="unknown argument 'clip_mask'"):
        encoder(batch, clip_mask=torch.ones(1, 100))
    with pytest.raises(vg.errors.InputError, match="'input_values' came twice"):
        encoder(batch, input_values=batch)
    with pytest.raises(vg.errors.InputError, match="got 9 positional arguments"):
        encoder(batch, *[None] * 8)


def test_fields_that_only_calls_with_a_mask_get():
    encoder = speech_encoder("parakeet", proven=False)
    check_clips(encoder)
    call = clips(encoder, [120, 60])
    out, expected = encoder(**call), encoder.module(**call)
    assert torch.equal(out.attention_mask, expected.attention_mask)
    assert out.attention_mask.dtype == expected.attention_mask.dtype
    assert encoder(call["input_features"]).attention_mask is None


def test_training_mode_is_refused():
    with pytest.raises(vg.errors.SpecError, match="training mode"):
        vg.recipes.speech(speech_model("wav2vec2 large").train())


def test_default_budgets_hold_clips_of_30_seconds():
    for name, longest in (("wav2vec2 base", 480_000), ("parakeet", 3000)):
        budgets = vg.recipes.speech(speech_model(name), backend="eager").budgets
        assert {budget.max_seqlen for budget in budgets} >= {longest}
        assert len(budgets) < 50


@pytest.mark.filterwarnings("ignore:graphs read")  # tables of sizes that the model no longer keeps
def test_tables_that_a_model_keeps_of_its_last_length_are_its_own_beside_graphs():
    encoder, model = speech_encoder("wav2vec2 rotary", proven=False), speech_model("wav2vec2 rotary")
    check_clips(encoder)
    for samples in (160, 400, 90, 400):  # 160 and 400 are the lengths of graphs, whose tables the model finds
        batch = torch.randn(2, samples)
        with torch.no_grad():
            expected = model(batch).last_hidden_state
            encoder.poison()
            torch.testing.assert_close(encoder(batch).last_hidden_state, expected)
            encoder.poison()
            assert torch.equal(encoder.module(batch).last_hidden_state, expected)
    assert not encoder.stats.eager
