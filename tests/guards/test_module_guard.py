"""`ModuleGuard`: what happens between capture and replay to memory and values that graphs read is found, or it is held."""

import copy
import gc
import logging
import re
import weakref
from collections import deque
from enum import Enum
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

import varlen_graphs as vg
from tests.support.encoders import UNVERIFIED, Attention, attention_encoder, attention_spec, encoder_of, rows_for
from tests.support.towers import distance, equal_bits
from varlen_graphs.guards.module_guard import CALLS, ModuleGuard
from varlen_graphs.shadows import shadow
from varlen_graphs.shadows.shadow import Shadow
from varlen_graphs.torch_dispatch.captured_inputs import CapturedInputs

SHAPED = attention_spec(rows=vg.inputs.Rows("x", shape=(8,)))


class Reaching(Attention):
    """Reads tensors that are no parameters or buffers: an attribute, one in a dict in a list, and one of a closure."""

    def __init__(self):
        super().__init__()
        self.factor = torch.full((8,), 3.0)
        self.caches = [{"bias": torch.full((8,), 0.5)}]
        hidden = torch.full((8,), 2.0)
        self.last = lambda x: x * hidden
        self.weights = nn.ModuleList(nn.Linear(8, 8) for _ in range(10))
        self.requires_grad_(False)

    def forward(self, x, cu_seqlens, max_seqlen):
        return self.last(super().forward(x, cu_seqlens, max_seqlen) * self.factor + self.caches[0]["bias"])


def hidden_of(module):
    return module.last.__closure__[0].cell_contents


CHANGES = {
    "a parameter has new data": (lambda m: setattr(m.qkv.weight, "data", m.qkv.weight.data.clone()), "'qkv.weight'"),
    "a parameter is of another dtype": (
        lambda m: setattr(m.qkv.bias, "data", m.qkv.bias.data.view(torch.int32)),
        "'qkv.bias' changed from float32 .* to int32",
    ),
    "a parameter is set": (lambda m: m.qkv.bias.set_(m.qkv.bias.clone()), "'qkv.bias' was moved or replaced"),
    "a parameter is transposed in place": (lambda m: m.qkv.weight.t_(), "'qkv.weight' changed from .* with strides"),
    "a parameter is a part of what it was": (
        lambda m: setattr(m.qkv.weight, "data", m.qkv.weight.data[:, :4]),
        r"'qkv.weight' changed from float32 \[24, 8\] .* to float32 \[24, 4\]",
    ),
    "a parameter is freed": (lambda m: m.qkv.bias.untyped_storage().resize_(0), "'qkv.bias' was freed"),
    "a parameter is resized": (lambda m: m.qkv.weight.untyped_storage().resize_(10**6), "'qkv.weight' was moved"),
    "the module is cast": (lambda m: m.double(), "was moved or replaced"),
    "an attribute is freed": (lambda m: m.factor.untyped_storage().resize_(0), "'factor' was freed"),
    "an attribute is set": (lambda m: m.factor.set_(torch.ones(8)), "'factor' was moved or replaced"),
    "an attribute has new data": (lambda m: setattr(m.factor, "data", torch.ones(8)), "'factor' was moved or replaced"),
    "a tensor in containers is freed": (
        lambda m: m.caches[0]["bias"].untyped_storage().resize_(0),
        re.escape("\"caches[0]['bias']\" was freed"),
    ),
    "a tensor of a closure is freed": (lambda m: hidden_of(m).untyped_storage().resize_(0), "'last.hidden' was freed"),
    "a tensor of a closure is set": (lambda m: hidden_of(m).set_(torch.ones(8)), "'last.hidden' was moved or replaced"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_whatever_happens_to_memory_that_graphs_read_is_found_soon_or_when_asked(change, message):
    for ask in (True, False):
        encoder, rows = attention_encoder([64], module=Reaching(), verify=UNVERIFIED), rows_for([6])
        encoder(rows, lengths=[6])
        encoder.check()
        change(encoder.module)
        with pytest.raises(
            vg.errors.StaleGraphError, match=message + r".*call encoder.release\(\).*on_change=.recapture."
        ):
            _ = encoder.check() if ask else [encoder(rows, lengths=[6]) for _ in range(CALLS)]


@pytest.mark.parametrize("at", [0, 5, 9])
def test_freed_memory_of_any_weight_is_found_soon_and_never_replayed_again(at):
    encoder, rows = attention_encoder([64], module=Reaching()), rows_for([6])
    encoder(rows, lengths=[6])
    encoder.module.weights[at].weight.untyped_storage().resize_(0)
    with pytest.raises(vg.errors.StaleGraphError, match=rf"'weights.{at}.weight' was freed"):
        _ = [encoder(rows, lengths=[6]) for _ in range(CALLS)]
    before = encoder.stats.replays.total()
    for call in (lambda: encoder(rows, lengths=[6]), lambda: encoder(rows, lengths=torch.tensor([6]))) * 3:
        with pytest.raises(vg.errors.StaleGraphError, match=rf"'weights.{at}.weight' was freed"):
            call()
    assert encoder.stats.replays.total() == before


@pytest.mark.parametrize("every", [2, 3])
def test_a_weight_that_is_replaced_in_some_calls_is_found_and_refused_from_then_on(every):
    encoder, rows, refused = attention_encoder([64], module=Reaching()), rows_for([6]), []
    encoder(rows, lengths=[6])
    for call in range(every * (CALLS + 9)):
        if call % every:
            encoder(rows, lengths=[6])
            continue
        try:
            functional_call(encoder, {"weights.7.weight": torch.ones(8, 8)}, (rows,), {"lengths": [6]})
            refused.append(False)
        except vg.errors.StaleGraphError:
            refused.append(True)
    assert refused == sorted(refused)
    assert all(refused[CALLS:])


def test_what_was_found_once_is_found_by_every_call_until_it_is_as_it_was():
    encoder, rows = attention_encoder([64], module=Reaching()), rows_for([6])
    expected = encoder(rows, lengths=[6])
    weight = encoder.module.weights[5].weight
    data, weight.data = weight.data, weight.data.clone()
    with pytest.raises(vg.errors.StaleGraphError):
        encoder.check()
    for _ in range(3):
        with pytest.raises(vg.errors.StaleGraphError, match=r"'weights.5.weight' was moved or replaced"):
            encoder(rows, lengths=[6])
    weight.data = data
    assert torch.equal(encoder(rows, lengths=[6]), expected)


def test_a_cache_that_is_replaced_is_captured_anew(caplog):
    encoder, rows = attention_encoder([64], module=Reaching()), rows_for([6])
    encoder(rows, lengths=[6])
    held = weakref.ref(encoder.module.factor.untyped_storage())
    encoder.module.factor = torch.zeros(8)
    assert distance(encoder(rows, lengths=[6]), encoder.eager(rows, lengths=[6])) < 1e-6
    assert "'factor' was moved or replaced" in caplog.text
    gc.collect()
    assert held() is None
    encoder.check()
    assert not encoder.stats.eager


def test_values_that_change_in_place_are_followed_wherever_they_are():
    encoder, rows = attention_encoder([64], module=Reaching()), rows_for([6])
    encoder(rows, lengths=[6])
    module = encoder.module
    for tensor in (module.factor, module.caches[0]["bias"], hidden_of(module)):
        tensor.mul_(-2)
        assert distance(encoder(rows, lengths=[6]), encoder.eager(rows, lengths=[6])) < 1e-6
    encoder.check()


# What the module does not register


class Outside(nn.Module):
    """Reads modules and tensors that are none of its parts."""

    def __init__(self):
        super().__init__()
        self.listed = [{"first": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))}]
        both = torch.ones(16)
        self.first, self.second = both[:8], both[8:]
        self.table = torch.ones(8)
        self.parent = [nn.Linear(8, 8)]  # reached, and not read
        self.requires_grad_(False)

    def forward(self, input):
        data = self.table.data  # made for one use: what happens to the table is not seen by looking at it
        return self.listed[0]["first"](input) * self.first * self.second * data


def outside_encoder(**options):
    linear = nn.Linear(8, 8)

    def enclosed(module, input):
        return scaled(linear(module(input)))

    spec = vg.BufferSpec("input", vg.Lengths("lengths"))
    encoder = vg.GraphedEncoder(Outside(), [64], spec, backend="tape", forward=enclosed, **options)
    encoder(rows_for([6]), lengths=[6])
    return encoder, linear


GLOBAL = nn.Linear(8, 8)


def scaled(x):
    return GLOBAL(x)


@lru_cache
def cached():
    return torch.full((8,), 2.0)


def other_weights(module):
    module.load_state_dict({key: value + 1 for key, value in module.state_dict().items()}, assign=True)


OUTSIDE = {
    "a list": (lambda m, _: other_weights(m.listed[0]["first"]), "\"listed[0]['first'].0.weight\" was moved"),
    "one weight": (
        lambda m, _: setattr(m.listed[0]["first"][1], "bias", nn.Parameter(torch.ones(8))),
        "\"listed[0]['first'].1.bias\" was moved",
    ),
    "a part in a list": (lambda m, _: setattr(m.listed[0]["first"], "1", nn.Linear(8, 8)), "['first'].1\" was moved"),
    "a closure": (lambda _, linear: other_weights(linear), "'forward.linear.weight' was moved"),
    "a cast": (lambda _, linear: linear.double(), "'forward.linear.weight' was moved"),
    "a global": (
        lambda *_: setattr(GLOBAL.weight, "data", torch.zeros(8, 8)),
        "'a tensor float32 [8, 8] that the module does not hold' was moved",
    ),
    "the first view": (lambda m, _: setattr(m.first, "data", torch.zeros(8)), "'first' was moved"),
    "the second view": (lambda m, _: setattr(m.second, "data", torch.zeros(8)), "'second' was moved"),
    "what is read by an alias": (lambda m, _: setattr(m.table, "data", torch.zeros(8)), "'table' was moved"),
}


@pytest.mark.parametrize(("change", "message"), OUTSIDE.values(), ids=OUTSIDE.keys())
def test_weights_that_the_module_does_not_register_are_guarded(change, message):
    for ask in (True, False):
        encoder, linear = outside_encoder(verify=UNVERIFIED)
        encoder.check()
        change(encoder.module, linear)
        with pytest.raises(vg.errors.StaleGraphError, match=re.escape(message)):
            _ = encoder.check() if ask else [encoder(rows_for([6]), lengths=[6]) for _ in range(CALLS)]


@pytest.mark.parametrize("change", [change for change, _ in OUTSIDE.values()][:4])
def test_weights_that_the_module_does_not_register_are_captured_anew(change):
    encoder, linear = outside_encoder(capture=vg.options.Capture(on_change="recapture"))
    with torch.no_grad():
        change(encoder.module, linear)
    assert distance(encoder(rows_for([6]), lengths=[6]), encoder.eager(rows_for([6]), lengths=[6])) < 1e-6


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor):
        self.tensor = tensor


def replaced_first(held):
    held[0] = 3 * torch.ones(8)


def emptied(held):
    held.clear()
    held.append(3 * torch.ones(8))


HELD = {
    "a list": (lambda t: [t], lambda held: held[0], replaced_first),
    "a list of parameters": (lambda t: [nn.Parameter(t)], lambda held: held[0], replaced_first),
    "a list in a dict": (lambda t: {"a": [t]}, lambda held: held["a"][0], lambda held: replaced_first(held["a"])),
    "a deque": (lambda t: deque([t]), lambda held: held[0], replaced_first),
    "a list that is filled anew": (lambda t: [t], lambda held: held[0], emptied),
    "slots": (Slotted, lambda held: held.tensor, lambda held: setattr(held, "tensor", 3 * torch.ones(8))),
}


class Holds(nn.Module):
    """Multiplies rows by a tensor that it holds somewhere."""

    def __init__(self, held, get):
        super().__init__()
        self.held, self.get = held, get

    def forward(self, x):
        return x * self.get(self.held)


@pytest.mark.parametrize(("make", "get", "replace"), HELD.values(), ids=HELD.keys())
def test_a_tensor_that_is_replaced_in_what_is_no_registry_is_found(make, get, replace, caplog):
    module, rows = Holds(make(torch.ones(8)), get).eval(), rows_for([6])
    encoder = vg.GraphedEncoder(module, [64], vg.BufferSpec("x", vg.Lengths("lengths")), backend="tape")
    with torch.no_grad():
        assert torch.equal(encoder(rows, lengths=[6]), rows)
        replace(module.held)
        assert torch.equal([encoder(rows, lengths=[6]) for _ in range(CALLS)][-1], 3 * rows)
    assert "is another tensor" in caplog.text


def test_a_module_that_is_replaced_in_a_list_is_found_when_asked():
    encoder, _ = outside_encoder()
    encoder.check()
    encoder.module.listed[0]["first"] = nn.Linear(8, 8)
    with pytest.raises(vg.errors.StaleGraphError, match=re.escape("the module at \"listed[0]['first']\" was replaced")):
        encoder.check()


def test_a_module_that_is_reached_and_not_read_may_change():
    encoder, _ = outside_encoder()
    other_weights(encoder.module.parent[0])
    encoder.check()
    encoder(rows_for([6]), lengths=[6])


class Calling(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x)


def calling_encoder(call, **options):
    spec = vg.BufferSpec("x", vg.Lengths("lengths"))
    return vg.GraphedEncoder(Calling(call).eval(), [64], spec, backend="tape", **options)


def test_memory_whose_owner_cannot_be_found_is_told_of_once():
    HIDDEN.table = torch.ones(8)
    encoder = calling_encoder(lambda x, scale=1.0: x * HIDDEN.table)
    with pytest.warns(UserWarning, match=r"graphs read 1 tensor that neither .* holds: float32 \[8\]; they are held"):
        encoder(rows_for([6]), lengths=[6])
    expected = encoder(rows_for([6]), lengths=[6])
    HIDDEN.table = torch.zeros(8)
    gc.collect()
    assert equal_bits(encoder(rows_for([6]), lengths=[6]), expected)


def test_what_a_function_caches_is_held_and_told_of():
    encoder = calling_encoder(lambda x: x * cached())
    with pytest.warns(UserWarning, match=r"graphs read 1 tensor that neither .* holds: float32 \[8\]; they are held"):
        encoder(rows_for([6]), lengths=[6])
    cached().untyped_storage().resize_(0)
    with pytest.raises(vg.errors.StaleGraphError, match="was freed"):
        encoder(rows_for([6]), lengths=[6])
    cached.cache_clear()


class Cached(Attention):
    """Has tables that a state dict leaves out; its forward reads the one, and the other is for other code."""

    def __init__(self):
        super().__init__()
        for name in ("read", "unread"):
            self.register_buffer(name, torch.ones(8), persistent=False)

    def forward(self, x, cu_seqlens, max_seqlen):
        return super().forward(x, cu_seqlens, max_seqlen) * self.read


def test_a_cache_that_no_graph_reads_may_be_replaced():
    encoder, rows = attention_encoder([64], module=Cached()), rows_for([6])
    expected = encoder(rows, lengths=[6])
    encoder.module.register_buffer("unread", torch.zeros(16), persistent=False)
    encoder.check()
    assert equal_bits(encoder(rows, lengths=[6]), expected)
    encoder.module.register_buffer("read", torch.zeros(8), persistent=False)
    assert not encoder(rows, lengths=[6]).any()


def test_a_buffer_that_is_saved_may_not_be_replaced_even_if_no_graph_reads_it():
    module = Attention()
    module.register_buffer("saved", torch.ones(8))
    encoder, rows = attention_encoder([64], module=module), rows_for([6])
    encoder(rows, lengths=[6])
    module.saved = torch.zeros(8)
    with pytest.raises(vg.errors.StaleGraphError, match="'saved' was moved or replaced"):
        encoder(rows, lengths=[6])


@pytest.mark.parametrize(
    "resize", [lambda t: t.resize_(10**5), lambda t: t.resize_as_(torch.empty(10**5)), lambda t: t.data.resize_(10**5)]
)
def test_a_tensor_that_is_resized_is_found_soon(resize):
    encoder, rows = attention_encoder([64], module=Reaching()), rows_for([6])
    encoder(rows, lengths=[6])
    resize(encoder.module.weights[7].weight)
    with pytest.raises(vg.errors.StaleGraphError, match=r"'weights.7.weight' was moved"):
        _ = [encoder(rows, lengths=[6]) for _ in range(CALLS)]


# Containers


class Layers(nn.Module):
    """Runs the layers of a container, one of many."""

    def __init__(self, kind, listed):
        super().__init__()
        self.layers = kind(new(3)) if kind is nn.ModuleList else kind(*new(3))
        self.container = (lambda: self.listed[0]) if listed else (lambda: self.layers)
        if listed:  # where nothing registers the container
            self.listed = [self.layers]
            del self.layers

    def forward(self, x):
        for layer in self.container():
            x = layer(x)
        return x


def new(count):
    return [nn.Linear(8, 8) for _ in range(count)]


def layers_encoder(kind, listed, **options):
    torch.manual_seed(0)
    spec = vg.BufferSpec("x", vg.Lengths("lengths"))
    encoder = vg.GraphedEncoder(Layers(kind, listed).eval(), [64], spec, backend="tape", **options)
    return encoder, rows_for([6]), encoder(rows_for([6]), lengths=[6])


containers = pytest.mark.parametrize("kind", [nn.ModuleList, nn.Sequential])
listed = pytest.mark.parametrize("listed", [False, True], ids=["registered", "listed"])


@containers
@listed
def test_a_layer_is_guarded_after_its_container_was_made_anew(kind, listed):
    encoder, rows, expected = layers_encoder(kind, listed)
    layers = encoder.module.container()
    layers.append(nn.Linear(8, 8))
    layers.pop(-1)
    assert equal_bits(encoder(rows, lengths=[6]), expected)
    encoder.check()
    layers[0] = nn.Linear(8, 8)
    with pytest.raises(vg.errors.StaleGraphError, match=r"'(layers|listed\[0\]).0' was moved"):
        _ = [encoder(rows, lengths=[6]) for _ in range(CALLS)]


def insert_and_pop(layers):
    layers.insert(0, nn.Linear(8, 8))
    layers.pop(-1)


def delete(layers):
    del layers[1]


REARRANGED = {
    "inserted": lambda layers: layers.insert(1, nn.Linear(8, 8)),
    "inserted and popped": insert_and_pop,
    "inserted and popped twice": lambda layers: [insert_and_pop(layers), insert_and_pop(layers)],
    "deleted": delete,
    "popped and appended": lambda layers: layers.append(layers.pop(0)),
}


@containers
@listed
@pytest.mark.parametrize("change", REARRANGED.values(), ids=REARRANGED)
def test_layers_that_come_go_or_move_are_found_by_the_next_call(change, kind, listed):
    encoder, rows, _ = layers_encoder(kind, listed, verify=UNVERIFIED)
    change(encoder.module.container())
    with pytest.raises(vg.errors.StaleGraphError, match=r"was moved or replaced|gained or lost"):
        encoder(rows, lengths=[6])
    encoder, rows, _ = layers_encoder(kind, listed, capture=vg.options.Capture(on_change="recapture"))
    change(encoder.module.container())
    assert distance(encoder(rows, lengths=[6]), encoder.eager(rows, lengths=[6])) < 1e-6


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"first": nn.Linear(8, 8), "between": nn.ReLU(), "last": nn.Linear(8, 8)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def test_a_weight_that_is_registered_again_is_no_change():
    encoder = vg.GraphedEncoder(Named().eval(), [64], vg.BufferSpec("x", vg.Lengths("lengths")), backend="tape")
    rows = rows_for([6])
    expected = encoder(rows, lengths=[6])
    layer = encoder.module.layers["first"]
    weight = layer.weight
    del layer.weight
    layer.weight = weight
    for _ in range(CALLS):
        assert equal_bits(encoder(rows, lengths=[6]), expected)


def test_a_registry_made_anew_with_the_same_parts_is_no_change():
    encoder, rows, expected = layers_encoder(nn.ModuleList, False)
    encoder.module.layers.append(encoder.module.layers.pop(2))
    for _ in range(3):
        assert equal_bits(encoder(rows, lengths=[6]), expected)


# Uploads in the forward


class Uploads:
    """Watches uploads without a GPU: the device is `meta`, and all memory of the host is pinned."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
        self.memory = CapturedInputs(torch.device("meta"), "the module")

    def run(self, make):
        return self.memory.watch(lambda: make().to("meta", non_blocking=True) + 1)


def test_host_memory_that_is_uploaded_is_held(monkeypatch):
    uploads, kept = Uploads(monkeypatch), torch.ones(4)
    uploads.run(lambda: kept)
    assert kept.data_ptr() in uploads.memory.held


@pytest.mark.parametrize("make", [lambda: KEPT * 2, lambda: torch.rand(4), lambda: torch.ones(4).add_(KEPT)])
def test_host_memory_that_the_run_makes_and_uploads_is_refused(make, monkeypatch):
    with pytest.raises(
        vg.errors.CaptureError, match=r"uploads host memory that the run itself created\n  at .*test_module_guard.py"
    ):
        Uploads(monkeypatch).run(make)


KEPT = torch.ones(4)


@pytest.mark.parametrize("make", [lambda: torch.tensor([1.0, 2.0]), lambda: torch.ones(4)[1:]])
def test_host_memory_that_the_run_makes_of_numbers_is_a_constant(make, monkeypatch):
    uploads = Uploads(monkeypatch)
    uploads.run(make)
    assert torch.equal(uploads.memory.constants[0].on_host, make())


# What Python does


class Shift(Enum):
    NONE, ONE = 0, 1


class Options:
    gain = 1.0

    def __init__(self):
        self.bias = 0.0


class Slotted:
    __slots__ = ("gain",)

    def __init__(self, gain):
        self.gain = gain


class Scaling(nn.Module):
    """Its forward reads constants of all kinds, and changes some of them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.scale, self.mode = 2.0, "add"
        self.calls, self.rows, self.limit = 0, 0, None
        self.power, self.shift, self.activation = (1, 1), Shift.NONE, nn.functional.relu
        self.more = {"factors": [1.0, 1.0], "seen": set()}
        self.settings, self.slotted, self.number = Options(), Slotted(1.0), np.float32(1.0)
        self._inner = nn.Identity()
        self._inner.gain = 1.0

    def forward(self, x):
        self.calls += 1
        self.rows = len(x)
        x = self.norm(x) * self.scale * self.more["factors"][0] + self.settings.bias + self.more.get("offset", 0.0)
        x = self.activation(x) ** self.power[0] + self.shift.value
        x = (
            x
            * self.settings.gain
            * self.slotted.gain
            * self._inner.gain
            * float(self.number)
            * (1 + len(self.more["seen"]))
        )
        return x + 1 if self.mode == "add" else x


def scaling_encoder(**options):
    spec = vg.BufferSpec("x", vg.Lengths("lengths"))
    encoder = vg.GraphedEncoder(Scaling(), [64], spec, backend="tape", **options)
    encoder(rows_for([6]), lengths=[6])
    return encoder


def other_class(module):
    module.norm.__class__ = type("Other", (nn.LayerNorm,), {"forward": lambda self, x: x * 5})


ATTRIBUTES = {
    "a number": (lambda m: setattr(m, "scale", 3.0), "'scale' changed from 2.0 to 3.0"),
    "a string": (lambda m: setattr(m, "mode", "leave"), "'mode' changed from 'add' to 'leave'"),
    "of a part": (lambda m: setattr(m.norm, "eps", 1.0), "'norm.eps' changed from 1e-05 to 1.0"),
    "a tuple": (lambda m: setattr(m, "power", (2, 2)), "'power' changed from a tuple to a tuple"),
    "a member of an enum": (lambda m: setattr(m, "shift", Shift.ONE), "'shift' changed from a Shift to a Shift"),
    "a function": (lambda m: setattr(m, "activation", nn.functional.silu), "'activation' changed from a function"),
    "an entry of a list": (
        lambda m: m.more["factors"].__setitem__(0, 3.0),
        "\"more['factors'][0]\" changed from 1.0 to 3.0",
    ),
    "an entry of a list that grows": (
        lambda m: m.more["factors"].insert(0, 3.0),
        "\"more['factors'][0]\" changed from 1.0 to 3.0",
    ),
    "a new entry of a dict": (lambda m: m.more.update(offset=2.0), "'more.offset' changed from None to 2.0"),
    "a new entry of a set": (lambda m: m.more["seen"].add(1), "\"more['seen'][1]\" changed from None to True"),
    "a list that is replaced": (lambda m: m.more.update(factors=[2.0]), "'more.factors' changed from a list to a list"),
    "of an object": (lambda m: setattr(m.settings, "bias", 2.0), "'settings.bias' changed from 0.0 to 2.0"),
    "of the class of an object": (
        lambda m: setattr(m.settings, "gain", 2.0),
        "'settings.gain' changed from 1.0 to 2.0",
    ),
    "an object that is replaced": (
        lambda m: setattr(m, "settings", SimpleNamespace(bias=3.0, gain=1.0)),
        "'settings' changed from a Options to a SimpleNamespace",
    ),
    "a slot": (lambda m: setattr(m.slotted, "gain", 2.0), "'slotted.gain' changed from 1.0 to 2.0"),
    "a number of numpy": (lambda m: setattr(m, "number", np.float32(2.0)), "'number' changed from a float32"),
    "of a part with a private name": (
        lambda m: setattr(m.get_submodule("_inner"), "gain", 2.0),
        "'_inner.gain' changed from 1.0 to 2.0",
    ),
    "the forward": (lambda m: setattr(m, "forward", lambda x: x * 5), "the forward of the module was replaced"),
    "the forward of a part": (
        lambda m: setattr(m.norm, "forward", lambda x: x * 5),
        "the forward of 'norm' was replaced",
    ),
    "the class of a part": (other_class, "the class of 'norm' changed from LayerNorm to Other"),
}


@pytest.mark.parametrize(("change", "message"), ATTRIBUTES.values(), ids=ATTRIBUTES.keys())
def test_constants_and_forwards_that_change_are_found_by_a_check(change, message):
    encoder = scaling_encoder(verify=UNVERIFIED)
    encoder.check()
    change(encoder.module)
    with pytest.raises(vg.errors.StaleGraphError, match=re.escape(message)):
        encoder.check()


@pytest.mark.parametrize("name", [name for name in ATTRIBUTES if "class" not in name])
def test_constants_and_forwards_that_change_are_found_by_calls_and_captured_anew(name, caplog):
    change, message = ATTRIBUTES[name]
    encoder, rows = scaling_encoder(), rows_for([6])
    change(encoder.module)
    assert distance(encoder(rows, lengths=[6]), encoder.eager(rows, lengths=[6])) < 1e-6
    assert message in caplog.text
    encoder(rows, lengths=[6])
    assert encoder.stats.replays.total() == 3
    assert not encoder.stats.eager


@pytest.mark.parametrize("value", [float("nan"), None, torch.tensor(3.0)], ids=["nan", "none", "tensor"])
def test_a_number_that_becomes_none_is_found_by_calls_and_by_a_check(value):
    encoder, rows = scaling_encoder(), rows_for([6])
    encoder.module.unread = 2.0
    encoder.release()
    encoder(rows, lengths=[6])
    encoder.module.unread = value
    with pytest.raises(vg.errors.StaleGraphError, match=r"'unread' changed from 2\.0 to"):
        encoder.check()
    losses = encoder.executor.store.losses
    encoder(rows, lengths=[6])
    assert encoder.executor.store.losses == losses + 1


def test_an_attribute_that_hides_one_of_the_class_is_found_by_calls():
    class OfClass(Scaling):
        scale = 2.0

        def __init__(self):
            super().__init__()
            del self.scale

    spec = vg.BufferSpec("x", vg.Lengths("lengths"))
    encoder, rows = vg.GraphedEncoder(OfClass(), [64], spec, backend="tape"), rows_for([6])
    encoder(rows, lengths=[6])
    encoder.module.scale = 3.0
    assert distance(encoder(rows, lengths=[6]), encoder.eager(rows, lengths=[6])) < 1e-6


def test_objects_that_cannot_be_compared_are_looked_at_by_no_call():
    class Hostile(int):
        def __eq__(self, other):
            raise RuntimeError("nobody may compare this")

        __hash__ = int.__hash__

    encoder, rows = scaling_encoder(), rows_for([6])
    for value in (Hostile(3), torch.ones(8), Hostile(3)):
        encoder.module.beside = value
        encoder(rows, lengths=[6])
    assert encoder.stats.replays.total() == 4


def test_gradient_checkpointing_ends_no_graphs():
    encoder, rows = scaling_encoder(), rows_for([6])
    encoder.module.gradient_checkpointing = False
    encoder.release()
    for _ in range(5):
        encoder(rows, lengths=[6])
        encoder.module.gradient_checkpointing = not encoder.module.gradient_checkpointing
        encoder.check()
    assert not encoder.disabled


def test_equal_constants_that_are_set_anew_end_no_graphs():
    encoder, rows = scaling_encoder(), rows_for([6])
    module = encoder.module
    module.method = module.norm.reset_parameters
    encoder.release()
    for power in (1, 1, 1):
        encoder(rows, lengths=[6])
        module.power, module.scale, module.method = tuple([power] * 2), float("2.0"), module.norm.reset_parameters
        module.number = np.float32(power)
        module.more["seen"].add("x")
        module.more["seen"].clear()
        encoder.check()
    assert encoder.executor.store.losses == 1


def test_a_change_that_the_capture_of_another_budget_finds_is_followed():
    budgets = [32, 64, 96, 128, 160, 192, 224, 256]
    encoder = vg.GraphedEncoder(Scaling(), budgets, vg.BufferSpec("x", vg.Lengths("lengths")), backend="tape")
    encoder(rows_for([6]), lengths=[6])
    store = encoder.executor.store
    for losses, length in enumerate((60, 90, 120, 150, 180), 1):
        store.guard.find_change_sampled = lambda: None  # not in the sample of this call
        encoder.module.scale += 1.0
        rows = rows_for([length])
        assert distance(encoder(rows, lengths=[length]), encoder.eager(rows, lengths=[length])) < 1e-6
        assert store.losses == min(losses, 4)
        if store.guard is None:
            break
    assert "again and again" in next(iter(encoder.disabled.values()))
    assert encoder.stats.replays.total() == 4


class Counting(nn.Module):
    """Keeps something of calls of many rows, which are larger than all budgets."""

    def __init__(self, keep):
        super().__init__()
        self.norm, self.count, self.log, self.lengths = nn.LayerNorm(8), 0, [], {}
        self.keep = keep

    def forward(self, x):
        if len(x) > 64:
            self.keep(self, len(x))
        return self.norm(x)


KEEPS = {
    "a counter": lambda m, rows: setattr(m, "count", m.count + 1),
    "a log": lambda m, rows: m.log.append(rows),
    "a table": lambda m, rows: m.lengths.setdefault(rows, rows),
}


@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS.keys())
def test_what_calls_larger_than_all_budgets_keep_ends_no_graphs(keep):
    spec = vg.BufferSpec("x", vg.Lengths("lengths"))
    encoder = vg.GraphedEncoder(Counting(keep), [64], spec, backend="tape")
    for rows in (6, 100, 9, 130, 6, 150, 12):
        encoder(rows_for([rows]), lengths=[rows])
    assert encoder.executor.store.losses == 0
    assert encoder.stats.replays.total() == 4


class Lying(list):
    def __len__(self):
        raise RuntimeError("nobody may ask for the size")

    def __iter__(self):
        return iter(range(100))

    __bool__ = __len__


class Text(str):
    def __eq__(self, other):
        raise RuntimeError("nobody may compare this")

    __hash__ = str.__hash__


def test_containers_of_odd_classes_raise_nothing():
    encoder, rows = scaling_encoder(), rows_for([6])
    encoder.module.odd, encoder.module.keyed = Lying([1, 2]), {Text("forward"): 1}
    encoder.release()
    for _ in range(3):
        encoder(rows, lengths=[6])
    encoder.check()
    assert not encoder.stats.eager


def test_a_number_that_changes_with_each_call_leaves_them_eager():
    encoder, rows = scaling_encoder(), rows_for([6])
    encoder.module.steps = 0
    encoder.release()
    for _ in range(8):
        encoder(rows, lengths=[6])
        encoder.module.steps += 1
    (reason,) = encoder.disabled.values()
    assert "again and again, 'steps' changed" in reason
    assert "begin its name with an underscore" in reason
    assert {*encoder.stats.eager} == {"the module changes again and again"}


def test_attributes_that_are_neither_numbers_nor_text_may_come_and_go():
    encoder, rows = scaling_encoder(), rows_for([6])
    for value in ([1], None, torch.ones(2), "new", 3.0):
        encoder.module.beside = value
        encoder(rows, lengths=[6])
        del encoder.module.beside
        encoder(rows, lengths=[6])
    assert encoder.stats.replays.total() == 11


def test_numbers_that_change_are_answered_by_a_capture():
    encoder, rows = scaling_encoder(capture=vg.options.Capture(on_change="recapture")), rows_for([6])
    encoder.module.scale = 3.0
    assert distance(encoder(rows, lengths=[6]), encoder.eager(rows, lengths=[6])) < 1e-6


def test_numbers_that_the_forward_changes_are_its_own_business():
    encoder = scaling_encoder()
    for length in (6, 9):
        encoder.eager(rows_for([length]), lengths=[length])
        encoder.check()
    encoder.release()
    encoder(rows_for([6]), lengths=[6])
    encoder.eager(rows_for([9]), lengths=[9])
    encoder.module.limit = 5  # as a cache that begins with None
    encoder.check()


def test_state_that_the_first_call_left_behind_is_guarded():
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.states = []

        def forward(self, x):
            if not self.states:
                self.states.append(torch.ones(8))
            return x + self.states[0]

    encoder = calling_encoder(Stateful().eval())
    encoder(rows_for([6]), lengths=[6])
    encoder.check()
    encoder.module.call.states[0].untyped_storage().resize_(0)
    with pytest.raises(vg.errors.StaleGraphError, match=re.escape("'call.states[0]' was freed")):
        encoder.check()


# on_change="recapture"


MOVED = {
    "cast": lambda m: m.double(),
    "loaded": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}, assign=True),
    "new data": lambda m: setattr(m.qkv.weight, "data", m.qkv.weight.data + 1),
    "a weight": lambda m: setattr(m.qkv, "weight", nn.Parameter(m.qkv.weight + 1)),
    "a part": lambda m: setattr(m, "qkv", nn.Linear(8, 24)),
    "no bias": lambda m: m.qkv.register_parameter("bias", None),
    "a bias of None": lambda m: setattr(m.qkv, "bias", None),
}


@pytest.mark.parametrize("name", MOVED)
def test_moved_or_replaced_weights_raise_until_the_graphs_are_released(name):
    encoder, rows = attention_encoder(), rows_for([6])
    encoder(rows, lengths=[6])
    with torch.no_grad():
        MOVED[name](encoder.module)
    with pytest.raises(
        vg.errors.StaleGraphError, match=r"'qkv(\.\w+)?' was moved or replaced .*call encoder.release\(\)"
    ):
        encoder(rows, lengths=[6])
    encoder.release()
    assert distance(encoder(rows, lengths=[6]), encoder.eager(rows, lengths=[6])) < 1e-6


MORE = {"more": lambda m: m.register_parameter("extra", nn.Parameter(torch.ones(3)))}


@pytest.mark.parametrize(
    ("name", "staged"), [*((name, False) for name in MOVED | MORE), ("cast", True), ("a part", True)]
)
def test_a_change_is_answered_by_a_capture_in_the_same_call(name, staged, caplog):
    encoder, rows = attention_encoder(spec=SHAPED, capture=vg.options.Capture(on_change="recapture")), rows_for([6])
    encoder(rows, lengths=[6], scale=2.0)
    encoder(rows, lengths=[6])
    with torch.no_grad():
        (MOVED | MORE)[name](encoder.module)
    with caplog.at_level(logging.WARNING, "varlen_graphs"):
        encoder.check()
        if staged:
            with encoder.stage([6]) as stage:
                stage.rows.copy_(rows)
            got = stage.output
        else:
            got = encoder(rows, lengths=[6])
        assert distance(got, encoder.eager(rows, lengths=[6])) < 1e-6
        assert distance(encoder(rows, lengths=[6], scale=2.0), encoder.eager(rows, lengths=[6], scale=2.0)) < 1e-6
    (record,) = caplog.records
    assert re.search(
        r"(was moved or replaced|gained or lost a parameter, buffer or submodule) since .*: graphs are released",
        record.getMessage(),
    )
    assert not encoder.stats.eager
    assert repr(encoder).endswith("4 captured)")


def test_a_check_releases_and_the_next_call_captures():
    encoder, rows = attention_encoder(capture=vg.options.Capture(on_change="recapture")), rows_for([6])
    encoder(rows, lengths=[6])
    encoder.module.double()
    encoder.check()
    assert repr(encoder).endswith("0 captured)")
    assert distance(encoder(rows, lengths=[6]), encoder.eager(rows, lengths=[6])) < 1e-6


def test_hooks_on_parts_that_came_later_are_seen_after_a_capture():
    encoder, rows = attention_encoder(capture=vg.options.Capture(on_change="recapture")), rows_for([6])
    encoder(rows, lengths=[6])
    encoder.module.qkv = nn.Linear(8, 24)
    encoder(rows, lengths=[6])
    seen = []
    encoder.module.qkv.register_forward_hook(lambda *args: seen.append(1))
    encoder(rows, lengths=[6])
    assert seen
    assert encoder.stats.eager == {"forward hooks": 1}


def test_other_answers_to_a_change_are_refused():
    with pytest.raises(vg.errors.SpecError, match="on_change='ignore': expected one of 'error', 'recapture'"):
        attention_encoder(capture=vg.options.Capture(on_change="ignore"))


# What else lives in the memory of graphs


class Keeping(Attention):
    """Keeps what it computes, in several ways."""

    def __init__(self, keep):
        super().__init__()
        self.keep = keep
        self.kept = []

    def forward(self, x, cu_seqlens, max_seqlen, scale=1.0):
        out = super().forward(x, cu_seqlens, max_seqlen, scale)
        self.keep(self, out)
        return out


BOX = {}
HIDDEN = SimpleNamespace()
KEEPS = {
    "a global": lambda m, out: BOX.update(out=out.mean(1)),
    "elsewhere": lambda m, out: setattr(HIDDEN, "out", out.mean(1)),
}


@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
def test_what_others_keep_in_the_memory_of_graphs_is_told(keep):
    encoder, rows = attention_encoder([64], module=Keeping(keep)), rows_for([6])
    with pytest.warns(UserWarning, match="something outside of the module keeps 1 tensor made while graphs were"):
        encoder(rows, lengths=[6])
    assert "kept in the memory of graphs, which replays overwrite: float32 [64]" in encoder.report()
    BOX.clear()
    vars(HIDDEN).clear()
    encoder.release()
    assert "kept in" not in encoder.report()


@pytest.mark.parametrize(
    "keep",
    [
        lambda m, out: setattr(m, "seen", out * 2),
        lambda m, out: setattr(m.qkv, "first", (out * 2)[:3]),
        lambda m, out: setattr(m, "output", out),
        lambda m, out: setattr(m, "kept", [out.sum(0)]),
    ],
)
def test_what_the_module_keeps_is_that_of_its_first_call(keep, recwarn):
    module, rows = Keeping(keep), rows_for([6])
    alone = copy.deepcopy(module)
    encoder = attention_encoder([64], module=module)
    for _ in range(2):
        encoder(rows, lengths=[6])
        encoder(rows_for([9]), lengths=[9], scale=2.0)
    alone(rows, torch.tensor([0, 6], dtype=torch.int32), 6)
    alone(rows_for([9]), torch.tensor([0, 9], dtype=torch.int32), 9, scale=2.0)
    for name in ("seen", "output"):
        assert equal_bits(*(getattr(one, name, torch.zeros(1)) for one in (module, alone)))
    assert all(equal_bits(one, other) for one, other in zip(module.kept, alone.kept, strict=True))
    assert "kept in" not in encoder.report()
    assert not recwarn


def test_a_module_that_keeps_nothing_is_not_blamed(recwarn):
    class Cyclic(Attention):
        def forward(self, x, cu_seqlens, max_seqlen):
            parts = [super().forward(x, cu_seqlens, max_seqlen)]
            parts.append(parts)  # goes with the next collection only
            return parts[0]

    def fill_once(module, out):
        if not module.kept:
            module.kept.append(out * 2)  # in the warm-up: that is held, and no memory of graphs

    for module in (Attention(), Cyclic(), Keeping(fill_once)):
        encoder, rows = attention_encoder(module=module), rows_for([6])
        assert equal_bits(encoder(rows, lengths=[6]), encoder(rows, lengths=[6]))
        assert "kept in" not in encoder.report()
    assert not recwarn


class Sequence(nn.Module):
    """Applies its parts in their order."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Tanh()})
        self.scales = nn.ParameterDict({"a": torch.full((8,), 2.0), "b": torch.full((8,), 3.0)})
        self.eval()

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        for scale in self.scales.values():
            x = torch.tanh(x * scale)
        return x


REORDERED = {
    "a ModuleDict": lambda m: m.layers.update({"a": m.layers.pop("a")}),
    "a ParameterDict": lambda m: m.scales.update({"a": m.scales.pop("a")}),
}


@pytest.mark.parametrize(("name", "ask"), [("a ModuleDict", False), ("a ModuleDict", True), ("a ParameterDict", True)])
def test_another_order_of_parts_is_found_soon_or_when_asked(name, ask):
    encoder = encoder_of(module := Sequence())
    encoder(rows_for([6]), lengths=[6])
    REORDERED[name](module)
    with pytest.raises(vg.errors.StaleGraphError, match="submodules in another order"):
        _ = encoder.check() if ask else [encoder(rows_for([6]), lengths=[6]) for _ in range(CALLS)]


class OnGpu(ModuleGuard):
    """A guard whose calls compare samples, as on a GPU; on the host each compares everything."""

    def _prepare(self):
        memory, self._memory = self._memory, [SimpleNamespace(is_cuda=True)]
        super()._prepare()
        self._memory = memory


@pytest.mark.parametrize(
    ("change", "at"),
    [
        ("number", 0), ("number", 199), ("text", 57), ("none", 199), ("deleted", 0),
        ("forward", 0), ("forward", 57), ("forward", 199),
    ],
)  # fmt: skip
def test_each_attribute_of_hundreds_of_parts_is_compared_within_so_many_calls(change, at):
    parts = nn.ModuleList([nn.Linear(1, 1) for _ in range(200)])
    for part in parts:
        part.scale, part.mode = 1.0, "add"
    guard = OnGpu(parts, {}, [*parts.parameters()], snapshot=Shadow(parts).snapshot)
    assert not any(guard.find_change_sampled() for _ in range(2 * CALLS))
    part = parts[at]
    {
        "number": lambda: setattr(part, "scale", 2.0),
        "text": lambda: setattr(part, "mode", "leave"),
        "none": lambda: setattr(part, "scale", None),
        "deleted": lambda: delattr(part, "scale"),
        "forward": lambda: setattr(part, "forward", lambda x: x),
    }[change]()
    found = (guard.find_change_sampled() for _ in range(CALLS))
    assert any(one is not None and one.of_attribute and f"{at}" in one.what for one in found)


class Settings:
    """What an engine writes to while it runs."""

    def __init__(self):
        self.blocks, self.layers = None, {"text": nn.Linear(8, 8)}


class InEngine(Attention):
    def __init__(self):
        super().__init__()
        self.settings = Settings()


@pytest.mark.parametrize(("module", "losses"), [("an_engine.settings", 0), ("another_engine.settings", 1)])
def test_what_integrations_tell_of_the_program_around_may_change(module, losses, monkeypatch):
    monkeypatch.setattr(Settings, "__module__", module)
    monkeypatch.setattr(shadow, "HOSTS", {"an_engine"})
    encoder, rows = attention_encoder([64], module=InEngine()), rows_for([6])
    expected = encoder(rows, lengths=[6])
    encoder.module.settings.blocks = 28_615  # was `None`, which is not compared
    encoder.module.settings.layers["more"] = nn.Linear(8, 8)
    assert equal_bits(encoder(rows, lengths=[6]), expected)
    assert encoder.executor.store.losses == losses
    encoder.module.settings = Settings()
    assert equal_bits(encoder(rows, lengths=[6]), expected)
    assert encoder.executor.store.losses == losses + 1
