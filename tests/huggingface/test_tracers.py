"""Tracers, proxies, modes and transforms make of a wrapped model what they make of the model itself."""

import functools
import re

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import varlen_graphs as vg

transformers = pytest.importorskip("transformers", minversion="5.20")

from tests.support.patches import patches_of, patches_tower  # noqa: E402
from tests.support.speech_models import LAYERS  # noqa: E402
from tests.support.towers import distance, pixels, qwen3_vl_tower  # noqa: E402

SIZES = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
}  # fmt: skip
IMAGES = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


def text_call(lengths, seed):
    mask = (torch.arange(12) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(3, 97, mask.shape, generator=torch.Generator().manual_seed(seed)) * mask
    return {"input_ids": ids, "attention_mask": mask}


def clip_call(lengths, seed):
    mask = (torch.arange(300) < torch.tensor(lengths)[:, None]).long()
    return {
        "input_values": torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed)),
        "attention_mask": mask,
    }


def made(kind, config):
    torch.manual_seed(0)
    return kind(config).eval().requires_grad_(False)


MODELS = {
    "text": (
        lambda: made(transformers.BertModel, transformers.BertConfig(**SIZES, attn_implementation="eager")), [64],
        text_call([12, 3], 0), text_call([5, 12], 1),
    ),
    "speech": (
        lambda: made(transformers.Wav2Vec2Model, transformers.Wav2Vec2Config(**LAYERS)), [vg.budgets.Budget.padded(2, 300)],
        clip_call([300, 120], 0), clip_call([77, 300], 1),
    ),
    "images": (
        lambda: made(transformers.CLIPVisionModel, transformers.CLIPVisionConfig(**IMAGES)), [2],
        {"pixel_values": torch.randn(2, 3, 16, 16)}, {"pixel_values": torch.randn(2, 3, 16, 16)},
    ),
    "flattened patches": (
        lambda: patches_tower("pix2struct").requires_grad_(False), [vg.budgets.Budget.padded(2, 12)],
        {"flattened_patches": patches_of([(2, 3), (1, 4)])},
        {"flattened_patches": patches_of([(3, 2), (2, 2)], seed=1)},
    ),
    "grids": (
        lambda: qwen3_vl_tower().requires_grad_(False), [vg.budgets.Budget(128, items=4)],
        {"hidden_states": pixels([(1, 4, 6), (1, 4, 4)]), "grid_thw": torch.tensor([(1, 4, 6), (1, 4, 4)])},
        {"hidden_states": pixels([(1, 4, 4), (1, 4, 6)], 1), "grid_thw": torch.tensor([(1, 4, 4), (1, 4, 6)])},
    ),
}  # fmt: skip
"""Functions that make models, budgets, and two calls of one size in all, whose items differ in size."""


class First(nn.Module):
    """The first output of a model, called by position, as tracers do."""

    def __init__(self, model, names):
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *args):
        return self.model(**dict(zip(self.names, args, strict=True)))[0]


def traced(model, one, other):
    return torch.jit.trace(model, one, check_trace=False)(*other)


def made_fx(mode, pre_dispatch=False):
    def run(model, one, other):
        return make_fx(model, tracing_mode=mode, pre_dispatch=pre_dispatch, _allow_non_fake_inputs=True)(*one)(*other)

    return run


def exported(model, one, other):
    return torch.export.export(model, one).module()(*other)


def symbolic(model, one, other):
    return torch.fx.symbolic_trace(model)(*other)


def faked(model, one, other):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return model(*map(mode.from_tensor, other)).shape


def fakes_without_their_mode(model, one, other):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return model(*map(mode.from_tensor, other)).shape


def counted(model, one, other):
    with FlopCounterMode(display=False) as counter:
        model(*other)
    return counter.get_total_flops()


def mapped(model, one, other):
    return torch.vmap(lambda *args: model(*(x[None] for x in args))[0])(*other)


WAYS = {
    "jit": traced, "fx, real": made_fx("real"), "fx, fake": made_fx("fake"), "fx, symbolic": made_fx("symbolic"),
    "fx, before dispatch": made_fx("real", True), "export": exported, "fx, by names": symbolic, "fake mode": faked,
    "fake tensors": fakes_without_their_mode, "flops": counted, "vmap": mapped,
}  # fmt: skip


def outcome(way, *args):
    try:
        return way(*args)
    except Exception as error:  # the model itself may not take this way
        return type(error)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "ways", "is_first"),
    [
        ("text", WAYS, False),
        ("text", ("jit", "fake mode"), True),
        ("grids", ("jit", "fx, by names", "fake tensors"), False),
    ]
    + [(name, ("jit", "fx, real", "export"), False) for name in ("speech", "images", "flattened patches")],
)
def test_tracers_see_the_model_itself(name, ways, is_first):
    make, budgets, one, other = MODELS[name]
    plain, wrapped = First(make(), one), First(vg.wrap(make(), budgets, backend="tape"), one)
    calls = tuple(one.values()), tuple(other.values())
    if not is_first:
        wrapped(*calls[0])
    rights = 0
    for way in ways:
        run = WAYS[way]
        expected, got = outcome(run, plain, *calls), outcome(run, wrapped, *calls)
        if isinstance(expected, torch.Tensor):
            assert distance(got, expected) < 1e-6, way
            rights += 1
        else:
            assert got == expected, way
    assert rights
    (encoder,) = vg.encoders(wrapped.model).values()
    assert encoder.stats.eager["torch.jit.trace"]
    assert encoder.stats.eager.total() == encoder.stats.calls - (not is_first)
    wrapped(*calls[1])
    assert encoder.stats.replays.total() == 1 + (not is_first)  # nothing that was seen is left behind


@pytest.mark.parametrize("compiles", [
    lambda model, call: torch.export.export(model, call, strict=True),
    lambda model, call: torch.compile(model, backend="eager", fullgraph=True)(*call),
])  # fmt: skip
def test_compilers_that_may_not_break_their_graph_say_what_to_do(compiles):
    make, budgets, one, _ = MODELS["images"]
    model, call = First(vg.wrap(make(), budgets, backend="tape"), one), tuple(one.values())
    with pytest.raises(Exception, match=re.escape("call vg.unwrap(model) first")):
        compiles(model, call)
    torch._dynamo.reset()
    vg.unwrap(model.model)
    compiles(model, call)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_a_default_device_is_that_of_the_users_tensors_alone(name):
    make, budgets, _, other = MODELS[name]
    expected = make()(**other)[0]
    with torch.device("meta"):
        model = vg.wrap(make_on_cpu(make), budgets, backend="tape")
        out = model(**other)[0]
    real = other.get("attention_mask", torch.ones(1)).bool()
    if name == "text":
        out, expected = out[real], expected[real]
    elif name == "speech":
        out, expected = out[1], expected[1]  # as long as the batch
    assert distance(out, expected) < 1e-5
    (encoder,) = vg.encoders(model).values()
    assert encoder.stats.replays.total() == 1


def make_on_cpu(make):
    with torch.device("cpu"):
        return make()


@pytest.mark.parametrize("captured", [False, True], ids=["before the first call", "after it"])
@pytest.mark.parametrize(
    "decorate",
    [lambda own: lambda *args, **kwargs: own(*args, **kwargs), functools.partial, torch.no_grad()],
    ids=["function", "partial", "no_grad"],
)
def test_a_forward_that_is_decorated_later_is_called_once_and_finds_the_module(decorate, captured):
    make, budgets, call, _ = MODELS["images"]
    model, calls = make(), []
    expected = make()(**call)
    vg.wrap(model, budgets, backend="tape")
    if captured:
        model(**call)
    own = decorate(model.forward)

    def counted(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    model.forward = counted
    assert distance(model(**call), expected) < 1e-5
    calls.clear()
    assert distance(model(**call), expected) < 1e-5
    assert len(calls) == 1


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).relu()


def test_a_wrapped_module_is_exported_as_it_is():
    module, rows = Perceptron().eval().requires_grad_(False), torch.randn(2, 8)
    vg.wrap(module, backend="tape")
    exported = torch.export.export(module, (torch.randn(2, 8),), strict=False).module()
    torch.testing.assert_close(exported(rows), module.linear(rows).relu())
