"""Towers that no recipe is for, on a GPU: the same answers with graphs in them."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.gpu import on_gpus
from tests.support.multimodal import MULTIMODAL, TOWERS, answer, multimodal_inputs, multimodal_model, tower_model
from tests.support.towers import distance

pytestmark = on_gpus()


@pytest.fixture(autouse=True)
def in_float32():
    """By default cuDNN runs convolutions in TF32, whose algorithm may depend on the batch."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.mark.parametrize("family", sorted(MULTIMODAL.keys() - {"whisper"}))
def test_a_model_answers_as_before_and_replays_graphs(family):
    model = multimodal_model(family, device="cuda")
    inputs = multimodal_inputs(family, model)
    expected = answer(model, inputs)
    vg.wrap(model, [1, 2, 4])
    for _ in range(2):
        assert distance(answer(model, inputs), expected) < 1e-4
    assert distance(answer(model, inputs, output_hidden_states=True), expected) < 1e-4
    found = vg.encoders(model)
    (encoder,) = (one for path, one in found.items() if found.how[path] == "by_batch")
    assert encoder.stats.replays.total() >= 3
    assert not encoder.stats.eager
    vg.unwrap(model)
    assert distance(answer(model, inputs), expected) < 1e-4


def test_whisper_writes_the_same_tokens():
    model = multimodal_model("whisper", device="cuda")
    inputs = multimodal_inputs("whisper", model)
    expected = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    vg.wrap(model, [1, 2, 4])
    assert torch.equal(model.generate(**inputs, max_new_tokens=4, do_sample=False), expected)
    (encoder,) = vg.encoders(model).values()
    assert encoder.stats.replays.total() == 1


def test_a_table_that_a_tower_keeps_on_the_host_is_a_constant_until_it_changes():
    tower, x = tower_model("VideoMAEModel", device="cuda"), torch.randn(3, 4, 3, 16, 16, device="cuda")
    encoder = vg.recipes.by_batch(tower, [1, 4])
    assert distance(encoder(x), tower(x)) < 1e-4
    assert not encoder.stats.eager
    tower.embeddings.position_embeddings.mul_(2)
    assert distance(encoder(x), tower(x)) < 1e-4
    assert encoder.stats.eager.total() == 1


@pytest.mark.parametrize("name", TOWERS)
def test_an_encoder_by_itself_keeps_padding_out(name):
    tower = tower_model(name, device="cuda")
    encoder = vg.recipes.by_batch(tower, [1, 2, 4])
    shape, rows = encoder.spec.layout.usual, encoder.spec.row_input.name
    for count in (3, 1, 6):
        x = torch.randn(count, *shape, device="cuda")
        encoder(**{rows: x})
        encoder.poison()
        assert distance(encoder(**{rows: x}), tower(x)) < 1e-4
    assert not encoder.stats.eager
