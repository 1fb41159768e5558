"""`vg.wrap` understands towers by running copies of them: until the first call, nothing of the model has changed."""

import copy
import sys
import types

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.recipes.test_generic import generic_tower
from tests.state.test_absent import by_object
from tests.support.multimodal import tower_model
from tests.support.speech_models import speech_model
from tests.support.text_encoders import text_model
from tests.support.towers import distance


class Keeping(nn.Module):
    """A layer that counts its calls, and keeps a list, a table by length, a buffer and an object."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.calls, self.seen, self.by_shape = 0, [], {}
        self.stats = types.SimpleNamespace(largest=None)
        self.register_buffer("total", torch.zeros(()))
        self.register_forward_hook(self._note)

    def _note(self, module, args, output):
        self.calls += 1

    def forward(self, x, *args, **kwargs):
        self.seen.append(x.shape)
        self.by_shape.setdefault(x.shape, x.new_ones(()))
        self.stats.largest = x.amax()
        self.total += 1
        return self.inner(x, *args, **kwargs)


def state(model):
    """Everything that the parts of a model hold, tensors by identity."""
    return {
        path: {name: copy.copy(value) for name, value in vars(part).items()} for path, part in model.named_modules()
    }


MODELS = {
    "by batch": lambda: tower_model("ViTModel"),
    "items": lambda: generic_tower("GlmOcrVisionModel").eval(),
    "texts": lambda: text_model("bert"),
    "clips": lambda: speech_model("wav2vec2 large"),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_model_is_as_before_until_its_first_call(make):
    model = make()
    where, norm = next((path, part) for path, part in model.named_modules() if "norm" in path.lower())
    parent, _, name = where.rpartition(".")
    keeping = Keeping(norm).eval()
    setattr(model.get_submodule(parent), name, keeping)
    before, bits = state(model), {name: one.clone() for name, one in model.state_dict().items()}
    vg.unwrap(vg.wrap(model, backend="tape"))
    assert state(model) == before  # hooks among it
    vg.wrap(model, backend="tape")
    assert vg.encoders(model), vg.encoders(model).eager  # which runs it once more
    assert (keeping.calls, keeping.seen, keeping.by_shape, keeping.stats.largest) == (0, [], {}, None)
    assert all(torch.equal(one, bits[name]) for name, one in model.state_dict().items())


TOWER = """
from torch import nn

class Tower(nn.Module):
    main_input_name = "pixel_values"

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 8), nn.Linear(8, 8)])
        self.placeholder = False

    def forward(self, pixel_values):
        if self.placeholder:
            return absent(pixel_values)
        x = pixel_values.flatten(1)
        for layer in self.layers:
            x = layer(x).relu()
        return x
"""


def made_from(source):
    """Return a tower of a Python module."""
    exec(TOWER, vars(source))
    tower = source.Tower().eval()
    tower.config = types.SimpleNamespace(image_size=2, num_channels=3)
    return tower


def test_weights_that_the_first_run_makes_are_made_by_the_caller():
    tower, x = made_from(types.ModuleType("tower")), torch.randn(3, 3, 2, 2)
    tower.layers[0] = nn.LazyLinear(8)
    with pytest.raises(
        vg.errors.SpecError, match=r"Tower makes 'layers\.0\.weight' in its first run(.|\n)*run it once"
    ):
        vg.wrap(tower, [1, 4], backend="tape")
    assert nn.parameter.is_lazy(tower.layers[0].weight)
    expected = tower(x)
    assert distance(vg.wrap(tower, [1, 4], backend="tape")(x), expected) < 1e-5
    assert vg.encoders(tower)[""].stats.replays.total() == 1


@by_object
def test_objects_that_raise_at_any_access_do_no_harm_in_the_globals_of_a_tower(made, monkeypatch):
    source = types.ModuleType("tower_with_placeholders")
    monkeypatch.setitem(sys.modules, source.__name__, source)
    tower = made_from(source)
    vars(source)["absent"] = made()
    x = torch.randn(3, 3, 2, 2)
    expected = tower(x)
    vg.wrap(tower, [1, 4], backend="tape")
    assert all(distance(tower(x), expected) < 1e-5 for _ in range(2))
    assert vg.encoders(tower)[""].stats.replays.total() == 2


CALLS = {
    "texts": (
        vg.recipes.packed_text, lambda: text_model("bert"), vg.budgets.Budget(64, items=4),
        {"input_ids": torch.arange(1, 13).view(2, 6)},
    ),
    "clips": (
        vg.recipes.speech, lambda: speech_model("wav2vec2 large"), vg.budgets.Budget.padded(2, 800),
        {"input_values": torch.ones(2, 800)},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("recipe", "make", "budget", "call"), CALLS.values(), ids=CALLS)
def test_the_declared_forward_runs_the_towers_own_where_an_encoder_is_in_its_place(recipe, make, budget, call):
    model = make()
    expected = model(**call).last_hidden_state
    model.forward = recipe(model, [budget], backend="tape").forward
    encoder = model.forward.__self__
    for _ in range(2):
        assert distance(model(**call).last_hidden_state, expected) < 1e-5
    assert distance(encoder.eager(**call).last_hidden_state, expected) < 1e-5
    assert encoder.stats.calls == encoder.stats.replays.total() == 2
