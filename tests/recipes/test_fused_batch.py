"""`by_batch` on SigLIP, CLIP and Whisper, whose layers run fused."""

import re
from functools import partial

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import UNVERIFIED
from tests.support.fused_towers import LAYERS, TOWERS, batch, encoder_of, tower_of
from tests.support.operators import operators
from tests.support.text_encoders import IS_OLD
from tests.support.towers import distance

FUSED = {
    "siglip": {"attention": 2, "add_layer_norm": 4, "linear_gelu": 2},
    "siglip without a head": {"attention": 2, "add_layer_norm": 4, "linear_gelu": 2},
    "clip": {"attention": 2, "add_layer_norm": 3},  # the last layer has no norm after it
    "whisper": {"attention": 2, "add_layer_norm": 4},
}
"""Operators of the two layers of a tower."""

leaves_hooks = pytest.mark.skipif(IS_OLD, reason="transformers 4 replaces forwards of layers to record hidden states")

unchecked_encoder = partial(encoder_of, verify=UNVERIFIED)


def runs_fused(encoder, name):
    counts = operators(encoder, batch(name, 3))
    return {one: counts[f"varlen_graphs::{one}"] for one in FUSED[name]} == FUSED[name]


def check(encoder, x, tolerance=1e-5, **asked):
    out, expected = encoder(x, **asked), type(encoder.module).forward(encoder.module, x, **asked)
    assert type(out) is type(expected)
    assert out.keys() == expected.keys()
    states = zip(out.get("hidden_states") or (), expected.get("hidden_states") or (), strict=True)
    fields = ((out[one], expected[one]) for one in out if one != "hidden_states")
    assert all(distance(one, other) < tolerance for one, other in (*states, *fields))


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layers_run_fused_and_the_outputs_are_those_of_the_tower(name, dtype):
    encoder = encoder_of(tower_of(name, dtype))
    for count in (1, 2, 3, 6):
        check(encoder, batch(name, count, count, dtype), 1e-5 if dtype == torch.float32 else 0.02)
    assert not encoder.stats.eager
    if dtype == torch.float32:
        assert runs_fused(encoder, name)


@leaves_hooks
@pytest.mark.parametrize("name", TOWERS)
def test_hidden_states_are_graphed_and_a_tower_that_recorded_them_before_runs_fused(name):
    tower = tower_of(name)
    tower(batch(name, 1), output_hidden_states=True)  # leaves hooks of transformers
    encoder = unchecked_encoder(tower)
    for _ in range(2):
        check(encoder, batch(name, 3), output_hidden_states=True)
        check(encoder, batch(name, 3))
    assert not encoder.stats.eager
    assert runs_fused(encoder, name)


@leaves_hooks
@pytest.mark.parametrize("name", TOWERS)
def test_hidden_states_that_are_asked_for_later_leave_graphs_as_they_are(name, caplog):
    encoder, x = unchecked_encoder(tower_of(name)), batch(name, 3)
    check(encoder, x)
    (before,) = encoder.executor.store.sets
    for _ in range(2):
        encoder(x, output_hidden_states=True)  # the first one is compared with the tower, which gets hooks
        check(encoder, x)
    assert encoder.executor.store.sets[0] is before
    assert "released" not in caplog.text
    assert not encoder.stats.eager


@pytest.mark.parametrize("asked", [1, [0, -1], [17, 1], [1, -17]])
def test_layers_that_a_call_selects_are_those_of_the_tower(asked):
    encoder, x = unchecked_encoder(tower_of("siglip")), batch("siglip", 3)
    states = encoder(x, output_hidden_states=asked).hidden_states
    for own, expected in zip(states, encoder.module(x, output_hidden_states=asked).hidden_states, strict=True):
        assert (own is None) == (expected is None)
        assert own is None or distance(own, expected) < 1e-5


@pytest.mark.skipif(IS_OLD, reason="CLIP of transformers 4 takes no further arguments")
def test_an_argument_that_the_tower_refuses_raises_its_error():
    tower, x = tower_of("clip"), batch("clip", 2)
    with pytest.raises(TypeError) as own:
        tower(x, scaling=3.0)
    encoder = unchecked_encoder(tower)
    check(encoder, x)
    with pytest.raises(TypeError, match=re.escape(str(own.value))):
        encoder(x, scaling=3.0)


@pytest.mark.parametrize("name", TOWERS)
def test_arguments_that_change_nothing_leave_the_layers_fused(name):
    usual = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
    encoder, x = unchecked_encoder(tower_of(name)), batch(name, 3)
    check(encoder, x, **usual)
    assert not encoder.stats.eager
    assert operators(encoder, x, **usual)["varlen_graphs::attention"] == LAYERS


@pytest.mark.parametrize("name", ["siglip", "clip"])
def test_images_of_another_size_are_interpolated_as_the_tower_does(name):
    encoder = unchecked_encoder(tower_of(name))
    for _ in range(2):
        check(encoder, torch.randn(3, 3, 48, 64), interpolate_pos_encoding=True)
    assert not encoder.stats.eager


@pytest.mark.parametrize("length", [30, 39, 41])  # the convolutions make as many frames of 39 as of 40
def test_clips_of_a_wrong_length_raise_as_the_tower_does(length):
    encoder = unchecked_encoder(tower_of("whisper"))
    with pytest.raises(ValueError, match=rf"expects the mel input features to be of length 40, but found {length}"):
        encoder(torch.randn(2, 8, length))
    check(encoder, batch("whisper", 2))


@pytest.mark.parametrize("name", ["siglip", "whisper"])
def test_a_forward_that_is_replaced_after_the_capture_is_followed(name):
    tower = tower_of(name)
    encoder, x = unchecked_encoder(tower, capture=vg.options.Capture(on_change="recapture")), batch(name, 2)
    encoder(x)
    layers = tower.layers if name == "whisper" else next(m for n, m in tower.named_modules() if n.endswith("r.layers"))
    attention = layers[1].self_attn
    attention.forward = lambda *args, **kwargs: (2 * type(attention).forward(attention, *args, **kwargs)[0], None)
    for _ in range(70):
        out = encoder(x)
    assert distance(out.last_hidden_state, tower(x).last_hidden_state) < 1e-5
    assert not encoder.stats.eager


def test_parts_of_other_classes_run_as_they_are():
    tower = tower_of("siglip")
    layers = next(m for n, m in tower.named_modules() if n.endswith("r.layers"))
    layers[0].self_attn.q_proj = nn.Sequential(layers[0].self_attn.q_proj, nn.Tanh())
    layers[1].mlp.activation_fn = nn.ReLU()
    encoder = unchecked_encoder(tower)
    check(encoder, batch("siglip", 3))
    assert operators(encoder, batch("siglip", 3))["varlen_graphs::linear_gelu"] == 1

    class Louder(type(layers[0].mlp)):
        def forward(self, x):
            return 2 * super().forward(x)

    layers[1].mlp.__class__ = Louder
    encoder = unchecked_encoder(tower)
    check(encoder, batch("siglip", 3))
    assert operators(encoder, batch("siglip", 3))["varlen_graphs::attention"] == 0


def test_a_tower_whose_hook_changes_its_output_is_graphed_once_the_hook_is_gone():
    tower = tower_of("clip")

    def halved(module, args, output):
        output.pooler_output = output.pooler_output / 2
        return output

    handle = tower.register_forward_hook(halved)
    encoder, x = unchecked_encoder(tower), batch("clip", 2)
    hooked = encoder(x).pooler_output
    assert encoder.stats.eager == {"forward hooks": 1}
    handle.remove()
    assert distance(2 * hooked, encoder(x).pooler_output) < 1e-6
    assert encoder.stats.replays.total() == 1


@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_that_returns_what_fused_layers_do_not_runs_its_own(name):
    tower = tower_of(name)
    tower.set_attn_implementation("eager")
    tower.config.output_attentions = True
    encoder, x = unchecked_encoder(tower), batch(name, 2)
    out, expected = encoder(x), tower.forward(x)
    for one, other in zip(out.attentions, expected.attentions, strict=True):
        assert distance(one, other) < 1e-5
    assert encoder.stats.replays.total() == 1
