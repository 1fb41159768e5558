"""The state around a module: graphs answer calls in the state of their capture, and say what differs in another one."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import varlen_graphs as vg
from tests.support.encoders import Attention, attention_encoder, attention_spec, encoder_of, rows_for
from tests.support.towers import distance, equal_bits

DETERMINISM = "deterministic algorithms differ from the capture"
TF32 = "TF32 differs from the capture"
ROWS = rows_for([6])


class Setting:
    """A setting of torch, changed for a test."""

    def __init__(self, owner, name, value):
        self.owner, self.name, self.value = owner, name, value

    def __enter__(self):
        self.before = getattr(self.owner, self.name)
        setattr(self.owner, self.name, self.value)

    def __exit__(self, *error):
        setattr(self.owner, self.name, self.before)


class Deterministic:
    def __enter__(self):
        torch.use_deterministic_algorithms(True, warn_only=True)

    def __exit__(self, *error):
        torch.use_deterministic_algorithms(False)


SETTINGS = {
    "deterministic": (Deterministic, DETERMINISM),
    "deterministic cuDNN": (lambda: Setting(torch.backends.cudnn, "deterministic", True), DETERMINISM),
    "TF32 of products": (lambda: Setting(torch.backends.cuda.matmul, "allow_tf32", True), TF32),
    "TF32 of convolutions": (lambda: Setting(torch.backends.cudnn, "allow_tf32", False), TF32),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_process_are_those_of_the_capture(name):
    changed, reason = SETTINGS[name]
    encoder = attention_encoder()
    expected = encoder(ROWS, lengths=[6])
    with changed():
        assert distance(encoder(ROWS, lengths=[6]), expected) < 1e-6
        assert encoder.stats.eager == {reason: 1}
    assert equal_bits(encoder(ROWS, lengths=[6]), expected)
    assert encoder.stats.eager == {reason: 1}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_may_change_until_the_capture_and_after_a_release(name):
    changed, _ = SETTINGS[name]
    encoder = attention_encoder()
    with changed():
        encoder(ROWS, lengths=[6])
        encoder.release()
    encoder(ROWS, lengths=[6])
    assert not encoder.stats.eager
    assert encoder.stats.replays.total() == 2


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_both_ways_to_set_the_precision_may_be_mixed(precision):
    """Torch refuses to return the settings of the older way then."""
    encoder = attention_encoder()
    with Setting(torch.backends.cuda.matmul, "fp32_precision", precision):
        encoder(ROWS, lengths=[6])
        encoder(ROWS, lengths=[6])
    assert not encoder.stats.eager


def test_autocast_of_another_device_counts():
    encoder = attention_encoder()
    encoder(ROWS, lengths=[6])
    torch.set_autocast_enabled("cuda", True)
    try:
        encoder(ROWS, lengths=[6])
    finally:
        torch.set_autocast_enabled("cuda", False)
    encoder(ROWS, lengths=[6])
    assert encoder.stats.eager == {"autocast differs from construction": 1}


def test_a_call_in_another_state_runs_the_module_itself():
    """And not what `forward=` declares, which may compute something else there."""
    seen = []

    class Scales(nn.Linear):
        def forward(self, x, lengths):
            seen.append(torch.are_deterministic_algorithms_enabled())
            return super().forward(x)

    module = Scales(8, 8).eval().requires_grad_(False)
    encoder = encoder_of(module, forward=lambda module, x: nn.functional.linear(x, module.weight, module.bias))
    expected = encoder(ROWS, lengths=[6])
    with Deterministic():
        assert distance(encoder(ROWS, lengths=[6]), expected) < 1e-6
    assert seen[-1]


@pytest.mark.parametrize("state", ["hooks", "a mode"])
def test_no_graph_is_captured_that_holds_what_others_do(state):
    """A graph would go on doing it once they have ended."""
    module = Attention()
    encoder = attention_encoder(module=module, spec=attention_spec(rows=vg.inputs.Rows("x", shape=(8,))))
    if state == "hooks":
        handle = module.qkv.register_forward_hook(lambda module, args, output: output * 2)
        with pytest.raises(vg.errors.CaptureError, match=r"calls run eager now \(forward hooks\)"):
            encoder.capture()
        handle.remove()
    else:
        mode = FlopCounterMode(display=False)
        with mode, pytest.raises(vg.errors.CaptureError, match=r"calls run eager now \(a dispatch mode of torch\)"):
            encoder.capture()
    encoder.capture()
    assert distance(encoder(ROWS, lengths=[6]), encoder.eager(ROWS, lengths=[6])) < 1e-6
    assert encoder.stats.replays.total() == 1


def test_a_capture_that_failed_holds_no_settings():
    class Refuses(nn.Linear):
        def forward(self, x):
            if torch.are_deterministic_algorithms_enabled():
                raise RuntimeError("has no deterministic implementation")
            return super().forward(x)

    encoder = encoder_of(Refuses(8, 8).eval().requires_grad_(False))
    with (
        Deterministic(),
        pytest.raises((RuntimeError, vg.errors.CaptureError), match="no deterministic implementation"),
    ):
        encoder(ROWS, lengths=[6])
    encoder(ROWS, lengths=[6])
    assert not encoder.stats.eager
    assert encoder.stats.replays.total() == 1
