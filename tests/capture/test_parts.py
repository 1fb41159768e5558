"""`ModuleParts`: the modules whose training mode and hooks count: those that came later too, and those that nothing registers."""

import functools
import warnings

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import Attention, attention_encoder, encoder_of, rows_for
from tests.support.towers import distance, equal_bits
from varlen_graphs.capture.parts import ModuleParts

CHANGED = {"training mode differs from construction": 1}


def with_adapter(module):
    """Inject an adapter with dropout, as peft does: its layers are new, and in training mode."""
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.LoraConfig(r=4, target_modules=["qkv"], lora_dropout=0.5, init_lora_weights=False)
    return peft.inject_adapter_in_model(config, module)


def test_dropout_that_came_after_the_capture_is_not_captured():
    module, rows = Attention().eval(), rows_for([6])
    encoder = attention_encoder(module=module, capture=vg.options.Capture(on_change="recapture"))
    encoder(rows, lengths=[6])
    with_adapter(module)
    encoder(rows, lengths=[6])
    assert encoder.stats.eager == CHANGED
    module.eval()
    got = encoder(rows, lengths=[6])
    assert encoder.stats.eager == CHANGED
    assert equal_bits(got, encoder(rows, lengths=[6]))
    assert distance(got, encoder.eager(rows, lengths=[6])) < 1e-6


@pytest.mark.parametrize("ask", [lambda e: e.capture(), lambda e: e.verify([{"x": rows_for([6]), "lengths": [6]}])])
def test_dropout_that_came_before_the_first_capture_is_not_captured(ask):
    module = Attention().eval()
    encoder, rows = encoder_of(module, [vg.buffers.CuSeqlens(), vg.buffers.MaxSeqlen()]), rows_for([6])
    with_adapter(module)
    with pytest.raises(vg.errors.VarlenGraphsError, match="training mode differs from construction"):
        ask(encoder)
    encoder(rows, lengths=[6])
    assert encoder.stats.eager == CHANGED
    module.eval()
    assert distance(encoder(rows, lengths=[6]), encoder.eager(rows, lengths=[6])) < 1e-6
    assert encoder.stats.replays.total() == 1


def test_adapters_in_a_lazy_encoder_are_captured_in_evaluation_only():
    module = Attention().eval()
    encoder, rows = attention_encoder(module=module, capture=vg.options.Capture(lazy=True)), rows_for([6])
    with_adapter(module)
    encoder(rows, lengths=[6])
    assert not encoder.capture_pending()
    module.eval()
    encoder(rows, lengths=[6])
    assert encoder.capture_pending()
    assert equal_bits(encoder(rows, lengths=[6]), encoder(rows, lengths=[6]))


def test_a_part_is_expected_in_the_mode_of_the_part_it_came_into():
    module = Attention()
    module.frozen = nn.ModuleDict().eval()
    encoder, rows = attention_encoder(module=module), rows_for([6])
    module.frozen["drop"] = nn.Dropout(0.5)
    encoder(rows, lengths=[6])
    assert encoder.stats.eager == CHANGED
    module.frozen["drop"].eval()
    encoder(rows, lengths=[6])
    assert encoder.stats.replays.total() == 1


class Listed(nn.Module):
    """Runs modules that lie in a list, one of them without weights."""

    def __init__(self):
        super().__init__()
        self.parts = [nn.Sequential(nn.Linear(8, 8)), nn.Dropout(0.5).eval()]
        self.owners = []
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x * self.weight


@pytest.mark.filterwarnings("ignore:Listed has forward hooks, but the function that runs in its place")
@pytest.mark.parametrize("where", ["a list", "a closure"])
def test_hooks_on_modules_that_nothing_registers_are_seen(where):
    linear, seen = nn.Linear(8, 8), []
    module = Listed().eval()
    forward = None if where == "a list" else lambda module, x: linear(module(x))
    hooked = linear if forward else module.parts[0][0]
    encoder, rows = encoder_of(module, forward=forward), rows_for([6])
    encoder(rows, lengths=[6])
    handle = hooked.register_forward_hook(lambda *args: seen.append(1))
    encoder(rows, lengths=[6])
    assert seen == [1]
    assert encoder.stats.eager == {"forward hooks": 1}
    handle.remove()
    encoder(rows, lengths=[6])
    assert encoder.stats.replays.total() == 2


def test_the_training_mode_of_modules_in_lists_counts():
    encoder, rows = encoder_of(Listed().eval()), rows_for([6])
    encoder(rows, lengths=[6])
    encoder.module.parts[1].train()
    encoder(rows, lengths=[6])
    assert encoder.stats.eager == CHANGED
    encoder.release()
    encoder(rows, lengths=[6])
    assert encoder.stats.replays.total() == 1
    module = Listed().eval()
    module.parts[1].train()
    with pytest.warns(UserWarning, match="captured in training mode with 1 active dropout"):
        encoder_of(module)(rows, lengths=[6])


def test_a_module_that_contains_the_module_is_no_part_of_it():
    module = Listed().eval()
    whole = nn.ModuleDict({"encoder": module, "head": nn.Dropout(0.5)}).eval()
    module.owners.append(whole)
    encoder, rows = encoder_of(module), rows_for([6])
    whole.register_forward_hook(lambda *args: None)
    whole["head"].register_forward_hook(lambda *args: None)
    whole["head"].train()
    encoder(rows, lengths=[6])
    assert not encoder.stats.eager


class Helper:
    """An object of a part, which holds another module."""

    def __init__(self, module):
        self.module = module


class Raising:
    """An object that raises whatever it is asked for, as the placeholders of packages that are not installed."""

    def __getattribute__(self, name):
        raise ImportError(f"{name} was asked for")


RAISING = Raising()


@pytest.mark.parametrize(
    "hold",
    [
        lambda part: [part],
        lambda part: {"of": (part,)},
        lambda part: Helper(part),
        lambda part: functools.partial(torch.mul, other=part),
        lambda part: part.forward,
        lambda part: lambda x: part(x),
    ],
    ids=["a list", "a dict of tuples", "an object", "a partial", "a method", "a closure"],
)
def test_modules_that_a_part_holds_are_parts(hold):
    module = Listed().eval()
    module.parts.pop()
    dropout = nn.Sequential(nn.Dropout(0.5)).eval()
    module.held = hold(dropout)
    encoder, rows = encoder_of(module), rows_for([6])
    encoder(rows, lengths=[6])
    dropout[0].train()
    encoder(rows, lengths=[6])
    assert encoder.stats.eager == CHANGED
    dropout.eval()
    with_hook = dropout[0].register_forward_hook(lambda *args: None)
    encoder(rows, lengths=[6])
    with_hook.remove()
    assert encoder.stats.eager == CHANGED | {"forward hooks": 1}
    encoder(rows, lengths=[6])
    assert encoder.stats.replays.total() == 2


silu = nn.SiLU()  # in training mode, as the activations that transformers keeps in globals


class Activated(nn.Linear):
    shared = nn.Dropout(0.5)

    def forward(self, x):
        return silu(super().forward(x)) if RAISING is not None else self.shared(x)


class Gated(nn.Linear):
    def forward(self, x):
        return silu(super().forward(x))


def test_what_lies_in_globals_and_classes_is_no_part():
    module = Activated(8, 8)
    module.optional = [RAISING]
    assert ModuleParts(module, {"forward": Activated.forward}, {}).modules == [module]


def test_modules_in_globals_may_be_in_training_mode():
    encoder, rows = encoder_of(Gated(8, 8).eval().requires_grad_(False)), rows_for([6])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder(rows, lengths=[6])
    assert encoder.stats.replays.total() == 1
