"""`GraphedEncoder` as a part of a model: in the place of the tower, or beside it."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import Attention as AttentionBlock
from tests.support.encoders import attention_encoder, attention_spec, rows_for
from tests.support.towers import equal_bits


class Tower(nn.Module):
    """A tower with a configuration, parts, weights of its own, and both kinds of buffers."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(hidden_size=8)
        self.block = AttentionBlock()
        self.scale = nn.Parameter(torch.full((8,), 2.0))
        self.register_buffer("offset", torch.ones(8))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    @property
    def dtype(self):
        return self.scale.dtype

    def forward(self, x, cu_seqlens, max_seqlen):
        return self.block(x, cu_seqlens, max_seqlen) * self.scale + self.offset


class Model(nn.Module):
    """A model whose tower lies between other parts."""

    def __init__(self, tower=None):
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.visual = Tower() if tower is None else tower
        self.after = nn.Linear(8, 8)


class Beside(nn.Module):
    """A model that has its tower, and the encoder of it."""

    def __init__(self):
        super().__init__()
        self.tower = Tower()
        self.encoder = encoder_of(self.tower)


def encoder_of(tower):
    return attention_encoder(module=tower, spec=attention_spec(rows=vg.inputs.Rows("x", shape=(8,))))


def graphed():
    """Return a model with an encoder in the place of its tower, and the tower."""
    model = Model()
    tower = model.visual
    model.visual = encoder_of(tower)
    return model, tower


def other_weights(model):
    return {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}


def same_weights(model, expected):
    found = model.state_dict()
    return [*found] == [*expected] and all(torch.equal(found[name], expected[name]) for name in expected)


ROWS, LENGTHS = rows_for([5, 3]), [5, 3]


# In the place of the tower


def test_names_of_weights_stay_as_they_are():
    model, plain = graphed()[0], Model()
    assert [*model.state_dict()] == [*plain.state_dict()]
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in plain.named_buffers()]
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert len([*model.parameters()]) == len([*plain.parameters()])
    assert [*model.visual.state_dict()] == [*plain.visual.state_dict()]


def test_the_parts_are_those_of_the_tower():
    model, tower = graphed()
    assert dict(model.named_modules())["visual"] is model.visual
    assert dict(model.named_modules())["visual.block"] is tower.block
    assert dict(model.named_parameters())["visual.scale"] is tower.scale
    assert model.get_submodule("visual.block.qkv") is tower.block.qkv


@pytest.mark.parametrize("assign", [False, True])
def test_weights_are_loaded_by_the_names_of_the_tower(assign):
    model, tower = graphed()
    weights = other_weights(Model())
    model.load_state_dict(weights, assign=assign)
    assert same_weights(model, weights)
    assert torch.equal(tower.scale, weights["visual.scale"])
    model.visual.load_state_dict(Tower().state_dict())
    assert torch.equal(tower.scale, torch.full((8,), 2.0))


def test_graphs_use_the_weights_that_were_loaded():
    model, _ = graphed()
    before = model.visual(ROWS, lengths=LENGTHS)
    plain = Model()
    plain.load_state_dict(other_weights(plain))
    model.load_state_dict(plain.state_dict())
    after = model.visual(ROWS, lengths=LENGTHS)
    assert not torch.equal(before, after)
    assert equal_bits(after, encoder_of(plain.visual)(ROWS, lengths=LENGTHS))
    assert model.visual.stats.replays.total() == 2


@pytest.mark.parametrize("missing", ["visual.scale", "visual."])
def test_weights_that_a_state_dict_lacks_are_missing(missing):
    model, _ = graphed()
    weights = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(missing)}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: .*"visual.scale"'):
        model.load_state_dict(weights)
    assert "visual.scale" in model.load_state_dict(weights, strict=False).missing_keys


def test_an_empty_state_dict_is_not_that_of_an_encoder():
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "scale"'):
        encoder_of(Tower()).load_state_dict({})


def test_a_model_without_memory_has_its_names_too():
    with torch.device("meta"):
        model = Model()
    names = [*model.state_dict()]
    model.visual = encoder_of(model.visual)
    assert [*model.state_dict()] == names
    weights = other_weights(Model())
    model.load_state_dict(weights, assign=True)
    assert same_weights(model, weights)


def test_casts_modes_and_freezing_reach_the_tower():
    model, tower = graphed()
    assert model.eval().visual.training is tower.training is tower.block.training is False
    assert model.train().visual.training is tower.training is tower.block.training is True
    model.visual.eval()
    assert not tower.training
    assert not tower.block.training
    model.to(torch.float64)
    assert {tensor.dtype for tensor in (tower.scale, tower.offset, tower.block.qkv.weight)} == {torch.float64}
    model.requires_grad_(False)
    assert not tower.scale.requires_grad
    assert model.visual(ROWS, lengths=LENGTHS).dtype == torch.float64


def test_attributes_are_those_of_the_tower():
    model, tower = graphed()
    assert model.visual.config is tower.config
    assert model.visual.dtype == torch.float32
    assert model.visual.block is tower.block
    assert model.visual.scale is tower.scale
    assert model.visual.offset is tower.offset
    with pytest.raises(AttributeError, match="no attribute 'depth'"):
        model.visual.depth  # noqa: B018


def test_what_is_set_on_an_encoder_is_not_registered():
    model, tower = graphed()
    names = [*model.state_dict()]
    model.visual.note, model.visual.helper = "mine", nn.Linear(2, 2)
    assert model.visual.note == "mine"
    assert not hasattr(tower, "note")
    assert [*model.state_dict()] == names


def test_forward_hooks_of_an_encoder_run():
    model, _ = graphed()
    seen = []
    hooks = [
        model.visual.register_forward_pre_hook(lambda module, args: seen.append((module, "before"))),
        model.visual.register_forward_hook(lambda module, args, output: seen.append((module, tuple(output.shape)))),
    ]
    model.visual(ROWS, lengths=LENGTHS)
    assert seen == [(model.visual, "before"), (model.visual, (8, 8))]
    assert model.visual.stats.replays.total() == 1  # they see no more than the call
    for hook in hooks:
        hook.remove()
    model.visual(ROWS, lengths=LENGTHS)
    assert len(seen) == 2


def test_a_model_with_an_encoder_is_not_copied():
    model, tower = graphed()
    with pytest.raises(TypeError, match="copy its module, and make an encoder of the copy"):
        copy.deepcopy(model)
    model.visual = tower
    assert same_weights(copy.deepcopy(model), model.state_dict())


# Beside the tower


def test_weights_have_the_names_of_both_as_any_part_with_two_names():
    model, plain = Beside(), Beside()
    del plain.encoder
    names = [*plain.tower.state_dict()]
    assert [*model.state_dict()] == [*plain.state_dict(), *(f"encoder.{name}" for name in names)]
    assert model.state_dict()["encoder.scale"].data_ptr() == model.state_dict()["tower.scale"].data_ptr()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert len([*model.parameters()]) == len([*plain.parameters()])


@pytest.mark.parametrize("assign", [False, True])
def test_weights_are_loaded_by_the_names_of_both(assign):
    model, other = Beside(), Beside()
    with torch.no_grad():
        other.tower.scale.fill_(3.0)
    model.load_state_dict(other.state_dict(), assign=assign)
    assert same_weights(model, other.state_dict())
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "encoder.scale"'):
        model.load_state_dict({n: tensor for n, tensor in other.state_dict().items() if not n.startswith("encoder.")})


def test_an_encoder_in_a_list_adds_nothing_to_the_model():
    model, plain = Model(), Model()
    model.encoders = [encoder_of(model.visual)]
    assert [*model.state_dict()] == [*plain.state_dict()]
    weights = other_weights(plain)
    model.load_state_dict(weights)
    assert same_weights(model, weights)


# In the place of the forward


def test_an_encoder_as_the_forward_of_its_tower_raises_and_says_what_to_assign():
    tower = Tower().train()
    encoder = encoder_of(tower)
    tower.forward = encoder
    for traverse in (tower.state_dict, tower.train, lambda: [*tower.parameters()], lambda: [*tower.modules()]):
        with pytest.raises(
            vg.errors.SpecError, match=r"to put it in the place of the forward, assign encoder\.forward"
        ):
            traverse()
    del tower.forward
    tower.forward = encoder.forward
    assert [*tower.state_dict()] == [*Tower().state_dict()]
    assert equal_bits(tower(ROWS, lengths=LENGTHS), encoder_of(Tower())(ROWS, lengths=LENGTHS))
    assert encoder.stats.replays.total() == 1


def test_a_part_that_is_set_on_an_encoder_is_set_on_its_module():
    model, tower = graphed()
    before = model.visual(ROWS, lengths=LENGTHS)
    name, part = next((name, part) for name, part in tower.named_children())
    weight, _ = next(iter(part.named_parameters()))
    other = copy.deepcopy(part)
    with torch.no_grad():
        other.get_parameter(weight).add_(1)
    model.set_submodule(f"visual.{name}", other)
    assert tower.get_submodule(name) is other
    with pytest.raises(vg.errors.StaleGraphError, match=f"'{name}' was moved or replaced"):
        model.visual(ROWS, lengths=LENGTHS)
    model.visual.release()
    assert not torch.equal(model.visual(ROWS, lengths=LENGTHS), before)


def test_the_module_of_an_encoder_cannot_be_set():
    model, _ = graphed()
    with pytest.raises(AttributeError, match="make an encoder of the other module"):
        model.visual.module = nn.Linear(2, 2)


def test_a_module_may_have_parts_of_the_names_of_an_encoder_attribute():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.pool, self.stats, self.spec = nn.Linear(8, 8), nn.Identity(), nn.Tanh()

        def forward(self, x):
            return self.spec(self.stats(self.pool(x)))

    module = Named().eval().requires_grad_(False)
    encoder = vg.GraphedEncoder(module, [64], vg.BufferSpec("x", vg.Lengths()), backend="tape")
    assert encoder(ROWS, lengths=LENGTHS).equal(module(ROWS))
    assert encoder.stats.replays.total() == 1


RUNS = []


class Counted(Tower):
    def forward(self, x, cu_seqlens, max_seqlen):
        RUNS.append(len(x))
        return super().forward(x, cu_seqlens, max_seqlen)


def test_a_capture_runs_a_tower_no_more_often_where_its_encoder_is_in_the_place_of_its_forward():
    """It takes the place in copies, too, which is not something that the tower keeps."""
    runs = []
    for takes_the_place in (False, True):
        torch.manual_seed(0)
        tower = Counted().eval()
        encoder = encoder_of(tower)
        if takes_the_place:
            vars(tower)["forward"] = encoder
        RUNS.clear()
        encoder(rows_for([5, 9]), lengths=[5, 9])
        assert encoder.stats.replays.total() == 1
        runs.append(len(RUNS))
    assert runs[0] == runs[1]
