"""Whole models: the same tokens with graphs in them, and nothing else changed."""

import copy
import functools
import inspect
import io
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec

import pytest
import torch
import transformers
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import UNVERIFIED, VERIFIED
from tests.support.towers import distance, pixels, pooled, qwen3_vl_tower
from tests.support.whole_models import WHOLE, mixes, prompt, prompts, tokens, whole_model
from varlen_graphs.attention.transformers import use_attention

KEEPS_CLIPS_APART = find_spec("transformers.vision_utils")
"""The audio tower of transformers 4.57 does so in FlashAttention 2 alone, and with our attention."""

IMAGES, VIDEOS = [(1, 8, 8), (1, 4, 6)], [(2, 4, 4)]
BUDGETS = [64, 128]


def wrapped(model, verify=UNVERIFIED, **options):
    return vg.wrap(model, BUDGETS, backend="tape", verify=verify, **options)


@functools.cache
def pair(family):
    """Return a model, and one like it that is wrapped, for tests that change neither."""
    return whole_model(family), wrapped(whole_model(family))


def visual(model):
    """The vision tower and its path."""
    return next((module, path) for path, module in model.named_modules() if path.endswith("visual"))


def state(module):
    """What a wrap might change."""
    return {path: (type(m), {k: id(v) for k, v in vars(m).items()}) for path, m in module.named_modules()}


@contextmanager
def known_to_fail():
    """Transformers 4.57 cannot run Omni on images and a video in one prompt; what fails elsewhere is an error."""
    try:
        yield
    except RuntimeError as error:
        if not transformers.__version__.startswith("4."):
            raise
        pytest.skip(f"transformers 4 cannot run this model as it is: {error}")


@pytest.fixture(scope="module")
def model():
    return whole_model()


@pytest.fixture
def plain(model):
    """The model, unwrapped after the test."""
    yield model
    vg.unwrap(model)


@pytest.mark.parametrize("family", WHOLE)
def test_a_wrapped_model_generates_the_same_tokens(family):
    model = whole_model(family)
    tower, path = visual(model)
    shown = prompts(model, IMAGES, VIDEOS)
    with known_to_fail():
        expected = [tokens(model, inputs) for inputs in shown]
    assert not torch.equal(expected[0], tokens(model, prompt(model, IMAGES, seed=1)))  # it sees what it is shown
    before, keys = state(tower), [*model.state_dict()]
    assert wrapped(model, VERIFIED) is model
    assert visual(model)[0] is tower
    during = state(tower)
    assert during[""][1].pop("forward")
    assert during == before  # classes, hooks, parameters and all else
    assert [*model.state_dict()] == keys
    got = [tokens(model, inputs) for inputs in shown]
    assert all(map(torch.equal, got, expected))
    (encoder,) = [one for where, one in vg.encoders(model).items() if where == path]
    assert encoder.stats.replays.total() >= sum(name.startswith("pixel_values") for inputs in shown for name in inputs)
    assert not encoder.stats.eager
    assert vg.unwrap(model) is model
    assert state(tower) == before
    assert not vg.encoders(model)
    assert all(map(torch.equal, [tokens(model, inputs) for inputs in shown], expected))


def test_a_model_that_refuses_images_beside_a_video_goes_on_doing_so():
    model = whole_model("glm4v")
    assert not mixes(model)
    inputs = prompt(model, IMAGES, VIDEOS)
    for one in (model, wrapped(model)):
        with pytest.raises((RuntimeError, ValueError), match="do not match"):
            tokens(one, inputs)


def test_a_model_that_hears_has_two_towers():
    model = whole_model("qwen3_omni")
    inputs = prompt(model, IMAGES, clips=[250, 90])
    with nullcontext() if KEEPS_CLIPS_APART else use_attention(model.audio_tower):
        expected = tokens(model, inputs)
        assert not torch.equal(expected, tokens(model, prompt(model, IMAGES, clips=[250, 90], seed=1)))
        vg.wrap(model, [384], backend="tape", on_miss="error")
        assert torch.equal(tokens(model, inputs), expected)
    heard = {path.rpartition(".")[2]: one for path, one in vg.encoders(model).items()}
    assert {name: one.stats.items for name, one in heard.items()} == {"visual": 2, "audio_tower": 2}
    assert heard["visual"].pool is heard["audio_tower"].pool
    assert not heard["audio_tower"].stats.eager


def test_the_towers_of_an_omni_model_are_found_in_its_thinker():
    modeling = pytest.importorskip("transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe")
    config = modeling.Qwen3OmniMoeForConditionalGeneration.config_class(
        thinker_config=whole_model("qwen3_omni").config.to_dict(), enable_audio_output=False
    )
    model = wrapped(modeling.Qwen3OmniMoeForConditionalGeneration._from_config(config).eval())
    assert {path.rpartition(".")[2] for path in vg.encoders(model)} == {"visual", "audio_tower"}
    assert all(path.startswith("thinker.") for path in vg.encoders(model))


def test_nothing_is_captured_before_the_first_call(plain):
    wrapped(plain)
    assert len(vg.encoders(plain)["model.visual"].executor.store) == 0
    vg.encoders(plain)["model.visual"].capture()
    assert len(vg.encoders(plain)["model.visual"].executor.store) == 2


def test_each_call_returns_an_object_of_its_own(plain):
    wrapped(plain)
    tower, inputs = plain.model.visual, prompt(plain, IMAGES)
    first, second = (tower(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"]) for _ in range(2))
    pooled(first).fill_(torch.nan)
    first[-1].clear()
    assert pooled(second).isfinite().all()
    assert len(second[-1]) == 2


def test_a_model_without_a_tower_that_is_known_says_what_is():
    with pytest.raises(vg.errors.SpecError, match=r"ModuleList has no tower.*Qwen3VLVisionModel.*docs/recipes.md"):
        vg.wrap(nn.ModuleList([nn.Linear(2, 2)]))


def test_a_recipe_of_your_own_joins_by_declaring_itself():
    class Mine(nn.Linear):
        def forward(self, x, cu_seqlens):
            return super().forward(x)

    spec = vg.BufferSpec("x", vg.Lengths(), [vg.buffers.CuSeqlens(per="item")])

    @vg.recipes.register("Mine")
    def mine(tower, budgets=None, **options):
        return vg.GraphedEncoder(tower, budgets or [64], spec, **options)

    model = vg.wrap(nn.ModuleDict({"a": Mine(4, 4), "b": nn.ModuleList([Mine(4, 4)])}), {"b.0": [32]}, backend="tape")
    assert {path: one.budgets[0].rows for path, one in vg.encoders(model).items()} == {"a": 64, "b.0": 32}
    assert model["a"](torch.ones(3, 4), lengths=[3]).shape == (3, 4)
    first, second = vg.encoders(model).values()
    assert first.pool is second.pool


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: vg.wrap(m, budgetz=3), "budgetz"),
        (lambda m: vg.wrap(m, [0]), "no item could use it"),
        (lambda m: vg.wrap(m, {"model.audio": [128]}), r"budgets are for \['model.audio'\].*\['model.visual'\]"),
        (lambda m: vg.wrap(m.to("meta")), r"model.visual: .* on the meta device, where weights have no values"),
        (
            lambda m: m.model.visual.blocks[0].to("meta") and vg.wrap(m),
            r"'blocks.0.*' on the meta device, .* load them",
        ),
    ],
)
def test_a_wrap_that_fails_changes_nothing(change, message):
    model = copy.deepcopy(whole_model())
    before = state(model)
    with pytest.raises((vg.errors.VarlenGraphsError, TypeError), match=message):
        change(model)
    assert not vg.encoders(model)
    assert {p: t for p, (t, _) in state(model).items()} == {p: t for p, (t, _) in before.items()}


def test_a_model_is_wrapped_once(plain):
    wrapped(plain)
    with pytest.raises(vg.errors.SpecError, match=r"model.visual is wrapped already; call vg.unwrap"):
        wrapped(plain)


# The life of a model


def test_what_happens_between_the_wrap_and_the_first_call_counts():
    model = whole_model().train()
    wrapped(model).eval().bfloat16()
    inputs = prompt(model, IMAGES)
    features = model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
    assert pooled(features).dtype == torch.bfloat16
    assert not vg.encoders(model)["model.visual"].stats.eager


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.half(),
        lambda m: m.to(torch.float64),
        lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True),
        lambda m: setattr(m.model.visual.merger, "linear_fc2", nn.Linear(256, 64)),
    ],
    ids=["half", "to", "assign", "set"],
)
def test_weights_that_went_elsewhere_are_told_at_once_and_a_release_takes_them(change):
    model = wrapped(whole_model())
    tower = model.model.visual
    encoder = vg.encoders(model)["model.visual"]
    encoder(pixels(IMAGES), grid_thw=IMAGES)
    change(model)
    with pytest.raises(vg.errors.StaleGraphError, match=r"call encoder.release\(\)"):
        tower(pixels(IMAGES), grid_thw=torch.tensor(IMAGES))
    encoder.release()
    got = pooled(tower(pixels(IMAGES), grid_thw=torch.tensor(IMAGES)))
    vg.unwrap(model)
    expected = pooled(tower(pixels(IMAGES).to(tower.dtype), grid_thw=torch.tensor(IMAGES)))
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


def test_weights_that_went_elsewhere_are_captured_anew_if_asked():
    model = wrapped(whole_model(), capture=vg.options.Capture(on_change="recapture"))
    tower = model.model.visual
    tower(pixels(IMAGES), grid_thw=torch.tensor(IMAGES))
    model.half()
    got = pooled(tower(pixels(IMAGES), grid_thw=torch.tensor(IMAGES)))
    assert got.dtype == torch.float16
    assert vg.encoders(model)["model.visual"].stats.replays.total() == 2


def test_weights_loaded_in_place_are_followed():
    model, other = wrapped(whole_model()), whole_model()
    with torch.no_grad():
        other.model.visual.merger.linear_fc2.weight.mul_(-1)
    inputs = prompt(model, IMAGES)
    assert not torch.equal(tokens(model, inputs), tokens(other, inputs))
    model.load_state_dict(other.state_dict())
    assert torch.equal(tokens(model, inputs), tokens(other, inputs))


def test_a_saved_model_is_the_model(tmp_path):
    model = wrapped(whole_model())
    expected = tokens(model, prompt(model, IMAGES))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert not vg.encoders(loaded)
    assert torch.equal(tokens(loaded, prompt(model, IMAGES)), expected)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_wrapped_and_on_their_own(how):
    model = wrapped(whole_model())
    inputs = prompt(model, IMAGES)
    expected = tokens(model, inputs)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    with torch.no_grad():
        model.model.visual.merger.linear_fc2.weight.zero_()
    assert torch.equal(tokens(other, inputs), expected)
    assert not torch.equal(tokens(model, inputs), expected)
    encoder = vg.encoders(other)["model.visual"]
    assert encoder.module is other.model.visual
    assert encoder.stats.replays.total() == 1
    vg.unwrap(other)
    assert "forward" not in vars(other.model.visual)
    assert torch.equal(tokens(other, inputs), expected)
    assert vg.encoders(model)


def test_towers_of_a_pickled_model_share_a_pool_of_their_own():
    model = wrapped(whole_model("qwen3_omni"))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    first, second = vg.encoders(torch.load(file, weights_only=False)).values()
    assert first.pool is second.pool
    assert first.pool is not next(iter(vg.encoders(model).values())).pool


def test_an_outer_compiler_sees_nothing_of_a_first_call(plain):
    wrapped(plain, VERIFIED)
    inputs = prompt(plain, IMAGES)
    seen = []

    def features(rows, grid):
        return pooled(plain.model.visual(rows * 1.0, grid_thw=grid)) * 2

    def counted(graph, _):
        seen.append(graph)
        return graph

    call = inputs["pixel_values"], inputs["image_grid_thw"]
    compiled = torch.compile(features, backend=counted)
    first = compiled(*call)
    assert len(seen) == 2  # what comes before the tower, and after it
    assert torch.equal(first, compiled(*call))
    assert torch.equal(first, features(*call))
    assert vg.encoders(plain)["model.visual"].stats.replays.total() == 3


def test_an_outer_compiler_breaks_at_our_boundary(monkeypatch):
    monkeypatch.setitem(WHOLE, "qwen3_vl", (*WHOLE["qwen3_vl"][:3], {"num_hidden_layers": 2}))
    model = wrapped(whole_model())
    tower, inputs = model.model.visual, prompt(model, IMAGES)
    expected = model(**inputs).logits

    def features(rows, grid):
        return pooled(tower(rows * 1.0, grid_thw=grid)) * 2

    compiled = torch.compile(features, backend="eager")
    once = features(inputs["pixel_values"], inputs["image_grid_thw"])
    replays = vg.encoders(model)["model.visual"].stats.replays.total()
    for _ in range(2):
        assert torch.equal(compiled(inputs["pixel_values"], inputs["image_grid_thw"]), once)
    assert vg.encoders(model)["model.visual"].stats.replays.total() == replays + 2
    torch.testing.assert_close(torch.compile(model, backend="eager")(**inputs).logits, expected)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_grad_modes(plain, context):
    expected = tokens(plain, prompt(plain, IMAGES))
    wrapped(plain)
    with context():
        assert torch.equal(tokens(plain, prompt(plain, IMAGES)), expected)
    assert torch.equal(tokens(plain, prompt(plain, IMAGES)), expected)
    assert not vg.encoders(plain)["model.visual"].stats.eager


def test_autocast_is_fixed_at_the_first_use(plain):
    inputs = prompt(plain, IMAGES)
    call = {"hidden_states": inputs["pixel_values"], "grid_thw": inputs["image_grid_thw"]}
    wrapped(plain)
    with torch.autocast("cpu", torch.bfloat16):
        graphed = pooled(plain.model.visual(**call))
        assert vg.encoders(plain)["model.visual"].stats.replays.total() == 1
    plain.model.visual(**call)
    assert vg.encoders(plain)["model.visual"].stats.eager == {"autocast differs from construction": 1}
    vg.unwrap(plain)
    with torch.autocast("cpu", torch.bfloat16):
        expected = pooled(plain.model.visual(**call))
    torch.testing.assert_close(graphed, expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("name", ["glm_ocr", "glm5_next"])
def test_norms_under_autocast_leave_queries_and_keys_in_another_dtype(name):
    if name not in WHOLE:
        pytest.skip(f"this version of transformers has no {name}")
    model = whole_model(name).requires_grad_(False)
    inputs, original = prompt(model, IMAGES), copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected = original(**inputs).logits
    for captured in (False, True):
        wrapped(model, VERIFIED)
        if captured:
            model(**inputs)
        with torch.autocast("cpu", torch.bfloat16):
            assert distance(model(**inputs).logits, expected) < 0.02
        (encoder,) = vg.encoders(model).values()
        assert encoder.stats.replays.total() == 1
        assert encoder.stats.eager == ({"autocast differs from construction": 1} if captured else {})
        vg.unwrap(model)


def test_a_tower_in_training_mode_keeps_its_dropout_after_a_capture():
    config = transformers.PixtralVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, patch_size=4, image_size=32,
        attention_dropout=0.5,
    )  # fmt: skip
    tower = transformers.PixtralVisionModel(config).eval().requires_grad_(False)
    rows = torch.randn(1, 3, 16, 16)
    vg.wrap(tower, backend="tape")
    evaluated = tower(rows).last_hidden_state
    tower.train()
    dropped = [tower(rows).last_hidden_state for _ in range(2)]
    assert distance(*dropped) > 1e-3
    (encoder,) = vg.encoders(tower).values()
    assert encoder.stats.eager == {"training mode differs from construction": 2}
    assert torch.equal(tower.eval()(rows).last_hidden_state, evaluated)


def test_checkpointing_flags_change_nothing(plain):
    expected = tokens(plain, prompt(plain, IMAGES))
    wrapped(plain)
    plain.gradient_checkpointing_enable()
    assert torch.equal(tokens(plain, prompt(plain, IMAGES)), expected)
    plain.gradient_checkpointing_disable()
    assert not vg.encoders(plain)["model.visual"].stats.eager


def test_hooks_of_gradient_checkpointing_act_in_grad_mode_alone():
    config = transformers.SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    tower = transformers.SiglipVisionModel(config).eval().requires_grad_(False)
    rows = torch.randn(2, 3, 16, 16)
    expected = tower(rows).last_hidden_state
    vg.wrap(tower, backend="tape")
    tower.gradient_checkpointing_enable()
    tower.enable_input_require_grads()
    assert distance(tower(rows).last_hidden_state, expected) < 1e-5
    (encoder,) = vg.encoders(tower).values()
    assert encoder.stats.replays.total() == 1
    with torch.enable_grad():
        assert distance(tower(rows).last_hidden_state, expected) < 1e-5
    assert encoder.stats.eager == {"forward hooks": 1}


@pytest.mark.filterwarnings("ignore:.*outputs in evaluation mode carry no gradient")
def test_a_wrapped_tower_learns_in_training_mode_alone(plain):
    inputs = prompt(plain, IMAGES)
    weight = plain.model.visual.blocks[0].attn.qkv.weight
    for wrapping, learns in ((vg.unwrap, True), (wrapped, False), (nn.Module.train, True), (nn.Module.eval, False)):
        with torch.enable_grad():
            wrapping(plain)(**inputs).logits.sum().backward()
        assert (weight.grad is not None) is learns
        plain.zero_grad()


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_omni", "qwen2_vl", "qwen2_5_vl", "glm4v", "glm5_next"])
def test_what_is_asked_of_the_language_model_leaves_the_tower_graphed(family):
    """Models of transformers 5 hand on `output_hidden_states` to their towers."""
    original, model = pair(family)
    inputs = prompt(model, IMAGES)
    expected = original(**inputs, output_hidden_states=True)
    (encoder,) = (one for path, one in vg.encoders(model).items() if path.endswith("visual"))
    replays, eager = encoder.stats.replays.total(), encoder.stats.eager.copy()
    got = model(**inputs, output_hidden_states=True)
    assert distance(got.logits, expected.logits) < 1e-5
    assert len(got.hidden_states) == len(expected.hidden_states)
    assert encoder.stats.replays.total() == replays + 1
    assert encoder.stats.eager == eager


@pytest.mark.parametrize(("asked", "family"), [(True, one) for one in WHOLE] + [(1, "glm4v"), ((0, 3), "qwen3_vl")])
def test_hidden_states_are_those_of_the_original(family, asked):
    original, model = (visual(one)[0] for one in pair(family))
    inputs = prompt(pair(family)[0], IMAGES)
    call = {"grid_thw": inputs["image_grid_thw"], "output_hidden_states": asked}
    if not {"output_hidden_states", "kwargs"} & inspect.signature(original.forward).parameters.keys():
        pytest.skip("this tower takes no output_hidden_states")
    expected, got = (tower(inputs["pixel_values"], **call) for tower in (original, model))
    if isinstance(expected, tuple | torch.Tensor):
        return  # transformers 4.57 records none
    assert [state is None for state in got.hidden_states] == [state is None for state in expected.hidden_states]
    assert distance(got, expected) < 1e-5


def test_recorded_attentions_come_from_the_original(plain):
    wrapped(plain)
    inputs = prompt(plain, IMAGES)
    plain.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"], output_attentions=True)
    assert vg.encoders(plain)["model.visual"].stats.eager == {"output_attentions=True": 1}


@pytest.mark.parametrize("replaced", [False, True], ids=["the same", "replaced"])
def test_outputs_that_the_configuration_asks_for_come_from_the_original(replaced):
    model = wrapped(whole_model())
    tower, inputs = model.model.visual, prompt(model, IMAGES)
    call = {"hidden_states": inputs["pixel_values"], "grid_thw": inputs["image_grid_thw"]}
    tower(**call)
    if replaced:
        tower.config = copy.deepcopy(tower.config)
    tower.config.return_dict = False
    got = tower(**call)
    assert vg.encoders(model)["model.visual"].stats.eager == {"config.return_dict=False": 1}
    expected = vg.unwrap(model).model.visual(**call)
    assert type(got) is type(expected)
    assert len(got) == len(expected)


def test_hidden_states_that_the_configuration_asks_for_are_graphed():
    pytest.importorskip("transformers", minversion="5.0")
    model = wrapped(whole_model())
    tower, inputs = model.model.visual, prompt(model, IMAGES)
    call = {"hidden_states": inputs["pixel_values"], "grid_thw": inputs["image_grid_thw"]}
    tower(**call)
    tower.config.output_hidden_states = True
    got = tower(**call)
    assert not vg.encoders(model)["model.visual"].stats.eager
    assert distance(got, vg.unwrap(model).model.visual(**call)) < 1e-5


def test_several_models_share_a_pool():
    pool = vg.options.Pool()
    models = [wrapped(whole_model(), pool=pool) for _ in range(2)]
    with torch.no_grad():
        models[1].model.visual.merger.linear_fc2.weight.mul_(-1)
    alone = [tokens(copy.deepcopy(vg.unwrap(copy.deepcopy(one))), prompt(one, IMAGES)) for one in models]
    for _ in range(2):
        for one, expected in zip(models, alone, strict=True):
            assert torch.equal(tokens(one, prompt(one, IMAGES)), expected)
    assert all(vg.encoders(one)["model.visual"].pool is pool for one in models)


def test_a_tower_alone_can_be_wrapped():
    tower = qwen3_vl_tower()
    expected = tower(pixels(IMAGES), grid_thw=torch.tensor(IMAGES))
    wrapped(tower)
    assert distance(tower(pixels(IMAGES), grid_thw=torch.tensor(IMAGES)), expected) < 1e-5
    assert list(vg.encoders(tower)) == [""]


def doubled(tower):
    """Put the forward of a tower into a function."""
    forward = tower.forward

    def twice(*args, **kwargs):
        output = forward(*args, **kwargs)
        return type(output)(**{name: 2 * one for name, one in output.items() if isinstance(one, torch.Tensor)})

    tower.forward = twice
    return forward


@pytest.mark.parametrize("calls", [0, 2], ids=["before the first call", "after a capture"])
@pytest.mark.parametrize("kind", ["ViTModel", "BertModel", "Wav2Vec2Model"])
def test_a_forward_that_is_put_into_a_function_is_called_once(kind, calls):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {
        "ViTModel": {"image_size": 16, "patch_size": 8},
        "BertModel": {"vocab_size": 64},
        "Wav2Vec2Model": {
            "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
        },
    }[kind]  # fmt: skip
    config = getattr(transformers, kind.replace("Model", "Config"))(**sizes, **more)
    model = getattr(transformers, kind)(config).eval().requires_grad_(False)
    plain = copy.deepcopy(model)
    budgets = {"ViTModel": [2], "BertModel": [64], "Wav2Vec2Model": [vg.budgets.Budget.padded(2, 800)]}
    vg.wrap(model, budgets[kind], backend="tape")
    encoder = vg.encoders(model)[""]
    call = {
        "ViTModel": {"pixel_values": torch.randn(2, 3, 16, 16)},
        "BertModel": {"input_ids": torch.randint(1, 64, (2, 9))},
        "Wav2Vec2Model": {"input_values": torch.randn(2, 800)},
    }[kind]
    for _ in range(calls):
        model(**call)
    forward = doubled(model)
    doubled(plain)
    with pytest.warns(UserWarning, match=f"calls of {kind} run eager: its forward was put into another function"):
        assert distance(model(**call).last_hidden_state, plain(**call).last_hidden_state) < 1e-5
    assert distance(model(**call).last_hidden_state, plain(**call).last_hidden_state) < 1e-5
    assert sum(encoder.stats.eager.values()) == 2
    model.forward = forward
    model(**call)
    assert encoder.stats.replays.total() == calls + 1
