"""Towers that no recipe is for: `vg.wrap` finds and graphs them, and what it cannot graph it reports."""

import copy
import io
import types
import warnings

import pytest
import torch
import transformers
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import UNVERIFIED, VERIFIED
from tests.support.multimodal import (
    MULTIMODAL,
    TOWERS,
    answer,
    multimodal_inputs,
    multimodal_model,
    random,
    tower_model,
)
from tests.support.text_encoders import IS_OLD
from tests.support.towers import distance
from varlen_graphs.recipes import registry
from varlen_graphs.recipes.automatic.by_batch import by_batch

BATCHES = [1, 4]


def wrapped(model, verify=UNVERIFIED, **options):
    return vg.wrap(model, BATCHES, backend="tape", verify=verify, **options)


def tokens(model, inputs):
    return model.generate(**inputs, max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize("family", MULTIMODAL)
def test_a_model_answers_as_before_and_replays_graphs(family):
    if IS_OLD and family == "mllama":
        pytest.skip("the default rotary settings of Mllama build no model in transformers 4")
    if family == "llama4" and transformers.__version__ == "5.24.0":
        pytest.skip("its forward raises there, of its language model's output without `image_outputs`")
    model = multimodal_model(family)
    calls = [multimodal_inputs(family, model, seed) for seed in (0, 1)]
    expected = [answer(model, inputs) for inputs in calls]
    assert not torch.equal(*expected)  # it sees what it is shown
    generated = tokens(model, calls[0]) if model.can_generate() else None
    keys = [*model.state_dict()]
    wrapped(model, VERIFIED)
    assert [*model.state_dict()] == keys
    assert all(distance(answer(model, inputs), one) < 1e-5 for inputs, one in zip(calls, expected, strict=True))
    assert generated is None or torch.equal(tokens(model, calls[0]), generated)
    found = vg.encoders(model)
    ((path, encoder),) = ((path, one) for path, one in found.items() if found.how[path] == "by_batch")
    assert encoder.stats.replays.total() >= 2
    replays = encoder.stats.replays.total()
    assert distance(answer(model, calls[1], output_hidden_states=True), expected[1]) < 1e-5
    if not (IS_OLD and family == "siglip"):  # whose tower takes the argument there, and records nothing
        assert encoder.stats.replays.total() > replays  # what is asked of the language model leaves the tower graphed
        assert not encoder.stats.eager
    assert path in found.report()
    assert not found.eager
    vg.unwrap(model)
    assert distance(answer(model, calls[1]), expected[1]) == 0
    assert not vg.encoders(model)


@pytest.mark.parametrize(("setting", "value"), [("return_dict", False), ("output_attentions", True)])
def test_a_setting_of_the_configuration_that_changes_counts(setting, value):
    model = tower_model("ViTModel")
    model.set_attn_implementation("eager")
    x, before = random(2, 3, 16, 16), getattr(model.config, setting)
    wrapped(model)(x)
    encoder = vg.encoders(model)[""]
    setattr(model.config, setting, value)
    got = model(x)
    assert encoder.stats.eager == {f"config.{setting}={value}": 1}
    setattr(model.config, setting, before)
    assert distance(model(x), model.forward(x)) == 0
    assert encoder.stats.eager.total() == 1
    vg.unwrap(model)
    setattr(model.config, setting, value)
    expected = model(x)
    assert type(got) is type(expected)
    assert len(got) == len(expected)


@pytest.mark.parametrize("name", TOWERS)
def test_an_encoder_by_itself_keeps_padding_out(name):
    tower = tower_model(name)
    encoder = by_batch(tower, BATCHES, backend="tape")
    rows = encoder.spec.row_input.name
    clips = dict.fromkeys(["VideoMAEModel", "VivitModel", "TimesformerModel"], (4, 3, 16, 16))
    shape = {"Molmo2VisionModel": (16, 48), **clips}
    side = 32 if {"SwinModel", "Swinv2Model", "ConvNextModel", "DINOv3ConvNextModel"} & {name} else 16
    calls = [random(count, *shape.get(name, (3, side, side)), seed=count) for count in (3, 1, 6)]
    for x in calls:
        encoder(**{rows: x})
        encoder.poison()
        assert distance(encoder(**{rows: x}), tower(x)) < 1e-5
    assert encoder.verify([{rows: x} for x in calls[:2]])
    assert not encoder.stats.eager


@pytest.mark.parametrize("name", ["ViTModel", "SwinModel"])
def test_a_wrapped_encoder_returns_to_itself(name):
    tower = tower_model(name)
    before = dict(vars(tower))
    wrapped(tower)
    assert list(vg.encoders(tower)) == [""]
    vg.unwrap(tower)
    assert vars(tower) == before


def test_a_classifier_learns_as_before():
    """Labels, and a mask of places to hide, are no part of what the graphs know."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(**TOWERS["ViTModel"], num_labels=3)
    model = transformers.ViTForImageClassification(config).eval()
    x, labels = random(2, 3, 16, 16), torch.tensor([0, 2])
    expected = model(x, labels=labels)
    wrapped(model)
    assert list(vg.encoders(model)) == ["vit"]
    assert distance(model(x, labels=labels).loss, expected.loss) < 1e-5
    model.train()
    with torch.enable_grad():
        model(x, labels=labels).loss.backward()
    assert model.vit.embeddings.cls_token.grad is not None


def test_calls_that_were_not_understood_run_eager_and_say_so():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    tower = transformers.ViTModel(transformers.ViTConfig(**TOWERS["ViTModel"]), use_mask_token=True).eval()
    x, hidden = random(2, 3, 16, 16), torch.arange(16).expand(2, 16) % 3 == 0
    expected = tower(x, bool_masked_pos=hidden)
    wrapped(tower)
    with pytest.warns(UserWarning, match="ViTModel, which vg.wrap found without a recipe .*'bool_masked_pos' holds a"):
        assert distance(tower(x, bool_masked_pos=hidden), expected) == 0
    tower(x, bool_masked_pos=hidden)  # warned of once
    assert vg.encoders(tower)[""].stats.eager == {"arguments that vg.wrap did not understand": 2}


def test_larger_images_get_graphs_of_their_own():
    tower = tower_model("ViTModel")
    x = random(2, 3, 24, 24)
    expected = tower(x, interpolate_pos_encoding=True)
    wrapped(tower)
    assert distance(tower(x, interpolate_pos_encoding=True), expected) < 1e-5
    tower(random(2, 3, 16, 16))
    assert vg.encoders(tower)[""].stats.replays.total() == 2


def test_images_may_be_other_than_the_configuration_says():
    tower = tower_model("ConvNextModel")
    x = random(1, 3, 64, 32)
    expected = tower(x)
    assert distance(wrapped(tower)(x), expected) < 1e-5
    assert not vg.encoders(tower)[""].stats.eager


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_wrapped_and_report_alike(how):
    model = wrapped(multimodal_model("llava"))
    inputs = multimodal_inputs("llava", model)
    if how == "deepcopy":  # before the first call: transformers then leaves hooks that cannot be pickled
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert distance(answer(other, inputs), answer(model, inputs)) == 0
    first, second = vg.encoders(model), vg.encoders(other)
    assert first.how == second.how
    assert first.eager == second.eager
    assert first["model.vision_tower"] is not second["model.vision_tower"]


def test_a_shallow_copy_shares_the_encoder_which_runs_the_original():
    model, x = wrapped(tower_model("ViTModel")), random(1, 3, 16, 16)
    other = copy.copy(model)
    vars(other)["_modules"] = dict(model.named_children()) | {"layernorm": nn.Identity()}
    assert distance(other(x), model(x)) == 0
    assert vg.encoders(other)[""] is vg.encoders(model)[""]


def test_a_model_in_training_mode_is_refused_where_chance_decides():
    tower = tower_model("ViTModel", hidden_dropout_prob=0.5).train()
    with pytest.raises(
        vg.errors.SpecError, match=r"(?s)ViTModel has no tower that can be graphed:.*or on chance: call .eval"
    ):
        wrapped(tower)


def test_towers_that_cannot_be_graphed_are_reported_with_the_reason():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Conv2d(3, 4, 4)])

        def forward(self, pixel_values):
            return self.layers[0](pixel_values) * float(self.layers[0].weight.mean())

    class Mixes(Reads):
        def forward(self, pixel_values):
            return self.layers[0](pixel_values - pixel_values.mean(0))

    both = nn.ModuleDict({"reads": Reads(), "mixes": Mixes()}).eval()
    for part in both.values():
        part.config = type("Config", (), {"image_size": 16})
    with pytest.raises(vg.errors.SpecError) as refused:
        wrapped(both)
    reasons = str(refused.value).splitlines()
    assert reasons[0] == "ModuleDict has no tower that can be graphed:"
    assert any("reads: by_batch: Reads cannot be graphed by batch: it could not be captured" in one for one in reasons)
    assert any("mixes: " in one and "depends on the other inputs of the batch" in one for one in reasons)
    both["sees"] = tower_model("ViTModel")
    found = vg.encoders(wrapped(both))
    assert list(found) == ["sees"]
    assert found.eager.keys() == {"reads", "mixes"}
    assert "mixes: eager, by_batch: Mixes cannot be graphed" in found.report()


def test_a_language_model_is_never_run():
    model = multimodal_model("llava")
    ran = []
    for part in (model, model.model, model.model.language_model):
        part.register_forward_hook(lambda *arguments: ran.append(arguments))
    wrapped(model)
    vg.encoders(model)["model.vision_tower"].capture()
    assert not ran


def test_a_model_of_language_alone_has_no_tower():
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**MULTIMODAL["llava"][1]["text_config"]))
    with pytest.raises(vg.errors.SpecError, match=r"LlamaForCausalLM has no tower"):
        wrapped(model)


# A module of one's own


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 4)

    def forward(self, x, weight, scale=None):
        x = self.embed(x) * weight[:, None, None]
        return x if scale is None else x * scale


def test_a_module_of_ones_own_says_the_shape_of_an_input_and_what_comes_beside():
    own = Own().eval()
    encoder = by_batch(own, BATCHES, shape=(5, 6), inputs=[vg.inputs.PerItem("weight")], backend="tape")
    x, weight = random(7, 5, 6), torch.arange(7.0)
    assert distance(encoder(x, weight), own(x, weight)) < 1e-5
    assert not encoder.stats.eager


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"its forward takes \['x', 'weight', 'scale'\].*by_batch\(tower, shape="),
        ({"shape": (5, 6)}, r"requires \['weight'\] too: pass .* with inputs="),
        ({"shape": (5, 7), "inputs": [vg.inputs.PerItem("weight")]}, r"for x \[2, 5, 7\] it raises RuntimeError"),
    ],
)
def test_what_is_missing_is_named(options, message):
    with pytest.raises(vg.errors.SpecError, match=message):
        by_batch(Own().eval(), BATCHES, backend="tape", **options)


# A recipe whose function calls the tower


class Texts(nn.Module):
    """Takes a mask of any form, and reads none of it on the host."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)

    def forward(self, input_ids, attention_mask):
        return self.embed(input_ids) * attention_mask.reshape(len(input_ids), -1)[..., None]


@pytest.mark.parametrize("place", ["wrap", "forward"])
def test_a_recipe_whose_function_calls_the_tower_does_not_recurse(place, monkeypatch):
    monkeypatch.setattr("varlen_graphs.recipes.registry.RECIPES", {})
    monkeypatch.setattr("varlen_graphs.doctor.advice.RECIPE_NAMES", {})

    def forward(tower, input_ids, mask):
        return tower(input_ids, attention_mask=mask)

    @vg.recipes.register("Texts")
    def texts(tower, budgets=None, **options):
        spec = vg.BufferSpec(
            rows=vg.inputs.Rows("input_ids", shape=(), dtype=torch.int64),
            layout=vg.Mask("attention_mask"),
            buffers=[vg.buffers.Mask("mask")],
        )
        return vg.GraphedEncoder(
            tower, vg.budgets.PaddedLadder(batch=4, length=16, min_length=16), spec, forward=forward, **options
        )

    tower = Texts().eval()
    ids, mask = torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    expected = tower(ids, mask)
    if place == "wrap":
        encoder = vg.encoders(vg.wrap(tower, backend="tape"))[""]
    else:
        encoder = texts(tower, backend="tape")
        tower.forward = encoder.forward
    encoder.capture()
    assert distance(tower(ids, attention_mask=mask), expected) < 1e-5
    assert distance(encoder.eager(ids, attention_mask=mask), expected) < 1e-5
    assert encoder.verify([{"input_ids": ids, "attention_mask": mask}])
    assert encoder.stats.replays.total() == 1
    assert not encoder.stats.eager


def bert():
    transformers = pytest.importorskip("transformers", minversion="5.0")
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(num_hidden_layers=2, **sizes)).eval()


def modern_bert():
    transformers = pytest.importorskip("transformers", minversion="5.0")
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    ends = dict.fromkeys(("bos_token_id", "cls_token_id"), 1) | dict.fromkeys(("eos_token_id", "sep_token_id"), 2)
    config = transformers.ModernBertConfig(num_hidden_layers=2, pad_token_id=0, local_attention=8, **sizes, **ends)
    torch.manual_seed(0)
    return transformers.ModernBertModel(config).eval()


def test_the_example_of_padded_texts_serves_as_a_recipe(monkeypatch):
    from examples.padded_text_encoder import graph

    monkeypatch.setitem(registry.RECIPES, "BertModel", lambda tower, budgets=None, **options: graph(tower, **options))
    model = bert()
    mask = (torch.arange(9) < torch.tensor([9, 4])[:, None]).long()
    ids = torch.randint(100, (2, 9)) * mask
    expected = model(ids, attention_mask=mask).last_hidden_state * mask[..., None]
    out = vg.wrap(model, backend="tape")(ids, attention_mask=mask)
    assert distance(out.last_hidden_state, expected) < 1e-5
    assert not vg.encoders(model)[""].stats.eager


def test_the_example_of_packed_texts_serves_as_a_recipe(monkeypatch):
    from examples.modern_bert import graph

    recipe = lambda tower, budgets=None, **options: graph(tower, **options)  # noqa: E731
    monkeypatch.setitem(registry.RECIPES, "ModernBertModel", recipe)
    model = modern_bert()
    documents = [torch.randint(100, (length,)) for length in (17, 5)]
    expected = torch.cat([model(document[None]).last_hidden_state[0] for document in documents])
    out = vg.wrap(model, backend="tape")(torch.cat(documents), lengths=[17, 5])
    assert distance(out, expected) < 1e-5
    assert not vg.encoders(model)[""].stats.eager


class Fickle(nn.Module):
    """Layers that read the host, once told to."""

    main_input_name = "pixel_values"

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16)])
        self.reads = False
        self.config = types.SimpleNamespace(image_size=16, num_channels=3)

    def forward(self, pixel_values):
        rows = self.layers[0](pixel_values).flatten(1)
        return rows * (1 if not self.reads or rows.isfinite().all().item() else 2)


def test_a_tower_whose_capture_fails_is_not_captured_at_every_call():
    model = nn.Sequential(Fickle()).eval()
    x = random(2, 3, 16, 16)
    expected = model(x)
    wrapped(model)
    encoder = vg.encoders(model)["0"]
    model[0].reads = True
    with pytest.warns(UserWarning, match=r"every call of Fickle, .*(?s:.*)isfinite"):
        assert distance(model(x), expected) == 0
    with warnings.catch_warnings(action="error"):
        model(x)
        model(x)
    assert encoder.stats.eager == {"its capture failed": 3}


def test_a_tower_that_memory_is_too_short_to_capture_runs_eager(monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("no room")

    model, x = nn.Sequential(Fickle()).eval(), random(2, 3, 16, 16)
    expected = model(x)
    encoder = vg.encoders(wrapped(model))["0"]
    monkeypatch.setattr(encoder.executor.store, "capture", fail)
    with pytest.warns(UserWarning, match=r"every call of Fickle, .*no room"):
        assert distance(model(x), expected) == 0
    assert encoder.stats.eager == {"its capture failed": 1}


class Masked(nn.Module):
    """Layers that hide places by a mask, in calls that say so."""

    main_input_name = "pixel_values"

    def __init__(self, hides):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16)])
        self.hides = hides
        self.config = types.SimpleNamespace(image_size=16, num_channels=3)

    def forward(self, pixel_values, patch_mask=None, mask_type="none"):
        x = self.layers[0](pixel_values)
        return x * patch_mask[:, None] if self.hides(x, patch_mask, mask_type) else x


@pytest.mark.parametrize(
    "hides",
    [
        lambda x, mask, kind: isinstance(mask, torch.Tensor),
        lambda x, mask, kind: mask is not None and kind == "some",
        lambda x, mask, kind: len(x) > 3 and mask is not None,
    ],
)
def test_a_mask_that_some_calls_use_is_not_dropped(hides):
    model = nn.Sequential(Masked(hides)).eval()
    x, mask = random(4, 3, 16, 16), torch.arange(16) % 3 * torch.ones(4, 16, 1)
    expected = model[0](x, patch_mask=mask, mask_type="some")
    wrapped(model)
    with pytest.warns(UserWarning, match="runs eager"):
        assert distance(model[0](x, patch_mask=mask, mask_type="some"), expected) == 0
    assert distance(model[0](x), model[0].layers[0](x)) < 1e-6
    assert vg.encoders(model)["0"].stats.replays.total() == 1


class Grouped(Masked):
    """Layers that take images in groups of 16, where they divide a batch, for frames of a clip."""

    def __init__(self):
        super().__init__(None)

    def forward(self, pixel_values):
        x = self.layers[0](pixel_values)
        return x if len(x) % 16 else (x.unflatten(0, (-1, 16)) - x[:16].mean(0)).flatten(0, 1)


def test_images_that_act_on_each_other_in_large_batches_stay_eager():
    model = nn.Sequential(Grouped()).eval()
    x = random(32, 3, 16, 16)
    expected = model(x)
    wrapped(model, VERIFIED)
    with pytest.warns(UserWarning, match="failed verification"):
        assert distance(model(x), expected) == 0


def test_an_empty_batch_is_the_towers_own():
    tower = tower_model("ConvNextModel")
    expected = tower(random(0, 3, 32, 32)).last_hidden_state
    wrapped(tower)
    with pytest.warns(UserWarning, match="runs eager"):
        assert tower(random(0, 3, 32, 32)).last_hidden_state.shape == expected.shape


def test_a_tower_partly_in_training_is_graphed_once_all_of_it_is_evaluated():
    model = nn.Sequential(Masked(lambda *_: False)).eval()
    model[0].layers.append(nn.Dropout(0.5))  # a new part, in training mode
    x = random(2, 3, 16, 16)
    wrapped(model)
    with pytest.warns(UserWarning, match=r"layers.1 inside of Masked is in training mode"):
        model(x)
    model.eval()
    model(x)
    assert vg.encoders(model)["0"].stats.replays.total() == 1
    assert vg.encoders(model)["0"].stats.eager == {"training mode differs from construction": 1}
