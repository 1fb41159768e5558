"""Whole models MiniCPM-V: their own code calls the encoder by `get_vllm_embedding`."""

import copy
import pickle

import pytest
import torch

import varlen_graphs as vg
from tests.support.encoders import UNVERIFIED, VERIFIED
from tests.support.minicpm_model import MiniCPMV, prompts
from tests.support.towers import distance

BUDGETS = [vg.budgets.Budget(256, items=8)]

SIZES = [[(5, 7), (3, 3), (12, 9)], [], [(2, 25), (1, 1)]]
CASES = {
    "2.5": prompts(SIZES),
    "2.6": prompts(SIZES),
    "4.5": prompts(SIZES),
    "4.5 in groups": prompts([[(5, 7), (3, 3), (12, 9), (4, 4)]], [[[-1], [3, 70, 71]]]),
}


def wrapped(model, verify=UNVERIFIED, **options):
    return vg.wrap(model, BUDGETS, backend="tape", verify=verify, **options)


def same(one, other):
    return all(distance(a, b) < 1e-4 for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_wrapped_model_generates_the_same(case):
    model, inputs = MiniCPMV(case.split()[0]).eval(), CASES[case]
    before, keys = dict(vars(model)), [*model.state_dict()]
    expected = model.generate(**inputs)
    other = [[one + 1 for one in prompt] for prompt in inputs["pixel_values"]]
    assert not same(model.generate(**inputs | {"pixel_values": other}), expected)  # it sees what it is shown
    assert wrapped(model, VERIFIED) is model
    assert [*model.state_dict()] == keys
    assert same(model.generate(**inputs), expected)
    found = vg.encoders(model)
    assert found.how == {"": "minicpmv_model"}
    assert found[""].stats.replays.total() >= 1
    assert not found[""].stats.eager
    assert "graphed by minicpmv_model" in found.report()
    vg.unwrap(model)
    assert vars(model) == before
    assert same(model.generate(**inputs), expected)


def test_features_that_come_with_a_call_are_taken_as_they_are():
    model, inputs = MiniCPMV("2.6").eval(), CASES["2.6"]
    expected = model.generate(**inputs)
    encoder = vg.recipes.minicpmv_model(model, BUDGETS, backend="tape")
    slices = [one for prompt in inputs["pixel_values"] for one in prompt]
    features = encoder(vg.recipes.pack_slices(slices), tgt_sizes=[size for own in SIZES for size in own])
    features = [*features.split([*map(len, SIZES)])]
    wrapped(model)
    assert same(model.generate(**inputs, vision_hidden_states=features), expected)
    assert not vg.encoders(model)[""].stats.calls
    without = prompts([[], []])
    assert same(model.generate(**without), MiniCPMV("2.6").eval().generate(**without))
    assert not vg.encoders(model)[""].stats.calls


def test_prompts_with_groups_get_their_own_features():
    """The original gives each as many as it has slices, and so leaves out what comes later in a batch."""
    model, sizes, times = MiniCPMV("4.5").eval(), [[(5, 7), (3, 3)], [(12, 9), (4, 4)]], [[[1, 2]], [[3, 70]]]
    both = prompts(sizes, times)
    alone = [{name: value[at : at + 1] for name, value in both.items()} for at in range(2)]
    expected = [model.get_vllm_embedding(one)[0] for one in alone]
    got, features = wrapped(model).get_vllm_embedding(both)
    assert distance(got, torch.cat(expected)) < 1e-5
    assert [len(own) for own in features] == [1, 1]


def test_2_5_as_it_is_shipped_is_refused_with_what_to_set():
    """Its slices attend to the padding of their batch, so what they become depends on the longest one beside them."""
    model, inputs = MiniCPMV("2.5", batch_vision_input=True).eval(), CASES["2.5"]
    with pytest.raises(vg.errors.SpecError, match="set model.config.batch_vision_input = False".replace(".", "[.]")):
        wrapped(model)
    shipped = model.get_vllm_embedding(inputs)[1]
    model.config.batch_vision_input = False
    expected = model.get_vllm_embedding(inputs)[1]
    assert distance(shipped[0], expected[0]) > 1e-2
    got = wrapped(model).get_vllm_embedding(inputs)[1]
    assert distance(torch.cat([got[0], got[2]]), torch.cat([expected[0], expected[2]])) < 1e-5
    model.config.batch_vision_input = True
    with pytest.raises(vg.errors.SpecError, match="attend to padding"):
        model.get_vllm_embedding(inputs)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_wrapped_and_on_their_own(how):
    model, inputs = wrapped(MiniCPMV("2.6").eval()), CASES["2.6"]
    expected = model.generate(**inputs)
    copied = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        copied.resampler.proj.mul_(2)
    assert not same(copied.generate(**inputs), expected)
    assert vg.encoders(copied)[""].stats.replays.total() >= 1
    assert same(model.generate(**inputs), expected)


def test_training_runs_the_modules_of_the_model():
    model, inputs = wrapped(MiniCPMV("2.6").train()), CASES["2.6"]
    with torch.enable_grad():
        model.get_vllm_embedding(inputs)[0].sum().backward()
    assert model.resampler.proj.grad is not None
    assert model.vpm.embeddings.position_embedding.weight.grad is not None


def test_other_models_of_that_name_say_what_is_expected():
    model = MiniCPMV("2.6").eval()
    del model.resampler
    with pytest.raises(
        vg.errors.SpecError, match=r"MiniCPMV has no \['resampler'\]: expected a model MiniCPM-V 2.5, 2.6"
    ):
        wrapped(model)
    model = MiniCPMV("2.6").eval()
    model.vpm.to("meta")
    with pytest.raises(vg.errors.SpecError, match=r"MiniCPMVTower has .* on the meta device"):
        wrapped(model)
