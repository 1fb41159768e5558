"""Modes and transforms of torch see each operation of an eager call, so calls under them run eager."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import varlen_graphs as vg

LENGTHS = [6, 4]


class Double(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.nn.functional.linear else out


class Listed(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations.append(func)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def module():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8).eval().requires_grad_(False)


@pytest.fixture
def encoder(module):
    return vg.GraphedEncoder(module, [64], vg.BufferSpec("input", vg.Lengths("lengths")), backend="tape")


def check_untouched(encoder, module, reason):
    """The next call is captured and replayed, and right."""
    rows = torch.randn(10, 8)
    torch.testing.assert_close(encoder(rows, lengths=LENGTHS), module(rows))
    assert encoder.stats.eager == {reason: 1}
    assert encoder.stats.replays.total() == 1


@pytest.mark.parametrize("captured", [False, True])
def test_a_function_mode_acts_and_is_not_captured(module, encoder, captured):
    rows = torch.randn(10, 8)
    if captured:
        encoder(rows, lengths=LENGTHS)
    with Double():
        assert torch.equal(encoder(rows, lengths=LENGTHS), module(rows))
    if not captured:
        check_untouched(encoder, module, "a function mode of torch")


def test_a_default_device_is_no_reason(module, encoder):
    with torch.device("cpu"):
        encoder(torch.randn(10, 8), lengths=LENGTHS)
    assert not encoder.stats.eager


def test_a_dispatch_mode_sees_what_the_module_computes(module, encoder):
    with Listed() as listed:
        encoder(torch.randn(10, 8), lengths=LENGTHS)
    assert torch.ops.aten.addmm.default in listed.operations
    check_untouched(encoder, module, "a dispatch mode of torch")


def test_fake_tensors_spoil_nothing(module, encoder):
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        rows = fake.from_tensor(torch.randn(10, 8))
        assert encoder(rows, lengths=LENGTHS).shape == (10, 8)
    check_untouched(encoder, module, "a dispatch mode of torch")


def test_tangents_are_kept(module, encoder):
    rows, tangent = torch.randn(2, 10, 8)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(rows, tangent)
        got, expected = (forward_ad.unpack_dual(out).tangent for out in (encoder(dual, lengths=LENGTHS), module(dual)))
        torch.testing.assert_close(got, expected)
    check_untouched(encoder, module, "forward-mode differentiation")


def test_transforms_run_the_module(module, encoder):
    rows = torch.randn(3, 10, 8)
    torch.testing.assert_close(torch.vmap(lambda x: encoder(x, lengths=LENGTHS))(rows), module(rows))
    check_untouched(encoder, module, "a transform of torch.func")
    _, tangents = torch.func.jvp(lambda x: encoder(x, lengths=LENGTHS), (rows[0],), (rows[1],))
    torch.testing.assert_close(tangents, rows[1] @ module.weight.T)
