"""The fused parts of transformer blocks: kernels against their references, and the modules they must not replace."""

import importlib
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP

from varlen_graphs.kernels.layer_norm import reference
from varlen_graphs.kernels.layer_norm import triton as kernel
from varlen_graphs.kernels.layer_norm.op import add_layer_norm
from varlen_graphs.kernels.linear_gelu.op import linear_gelu
from varlen_graphs.kernels.rms_norm import reference as rms_reference
from varlen_graphs.kernels.rms_norm import triton as rms_kernel
from varlen_graphs.kernels.rms_norm.op import add_rms_norm
from varlen_graphs.kernels.silu_mul import reference as silu_reference
from varlen_graphs.kernels.silu_mul import triton as silu_kernel
from varlen_graphs.kernels.silu_mul.op import silu_mul
from varlen_graphs.recipes import blocks
from varlen_graphs.recipes.blocks import add_norm, linear_activation, patch_convolution, rms_norm, swiglu

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


def norm_of(dim, seed=0):
    torch.manual_seed(seed)
    norm = nn.LayerNorm(dim, eps=1e-6)
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    return norm


def rms_norm_of(dim):
    torch.manual_seed(0)
    norm = Qwen2RMSNorm(dim)
    with torch.no_grad():
        norm.weight.normal_()
    return norm


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "dim"), [(0, 8), (1, 1), (3, 72), (5, 128), (2, 1152)])
@pytest.mark.parametrize("biased", [True, False])
def test_the_sum_and_its_norm_in_one_pass(rows, dim, dtype, biased):
    norm = norm_of(dim).to(dtype)
    x, delta = torch.randn(2, rows, dim).to(dtype).unbind(0)
    bias = norm.bias if biased else None
    total, normed = kernel.add_layer_norm(x, delta, norm.weight, bias, norm.eps)
    expected = reference.add_layer_norm(x, delta, norm.weight, bias, norm.eps)
    # The interpreter rounds to bfloat16 towards zero, so the sum may be one step off, and its norm two.
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(total, expected[0], rtol=step, atol=step)
    torch.testing.assert_close(normed, expected[1], rtol=4 * step, atol=4 * step)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "dim"), [(0, 8), (1, 1), (3, 72), (5, 128), (2, 1280)])
def test_the_sum_and_its_rms_norm_in_one_pass(rows, dim, dtype):
    x, delta = torch.randn(2, rows, dim).to(dtype).unbind(0)
    weight = torch.randn(dim).to(dtype)
    total, normed = rms_kernel.add_rms_norm(x, delta, weight, 1e-6)
    expected = rms_reference.add_rms_norm(x, delta, weight, 1e-6)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(total, expected[0], rtol=step, atol=step)
    torch.testing.assert_close(normed, expected[1], rtol=4 * step, atol=4 * step)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "dim"), [(0, 8), (1, 1), (3, 72), (5, 1026)])
def test_a_gate_and_what_it_lets_through_in_one_pass(rows, dim, dtype):
    gate, up = (4 * torch.randn(2, rows, dim)).to(dtype).unbind(0)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(
        silu_kernel.silu_mul(gate, up), silu_reference.silu_mul(gate, up), rtol=2 * step, atol=step
    )


@interpreted
def test_large_gates_neither_overflow_nor_leak():
    gate = torch.tensor([[-200.0, 200.0, torch.nan, 0.0]])
    out = silu_kernel.silu_mul(gate, torch.ones(1, 4))
    torch.testing.assert_close(out, torch.tensor([[0.0, 200.0, torch.nan, 0.0]]), equal_nan=True)


@interpreted
def test_the_kernel_reads_views_and_keeps_what_is_not_finite_in_its_row():
    norm = norm_of(24)
    x, delta = torch.randn(6, 3, 24)[:, 1], torch.randn(6, 48)[:, 24:]
    x[2] = torch.nan
    delta[4, 3] = torch.inf
    total, normed = kernel.add_layer_norm(x, delta, norm.weight, norm.bias, norm.eps)
    torch.testing.assert_close(total, x + delta, equal_nan=True)
    sound = [0, 1, 3, 5]
    torch.testing.assert_close(normed[sound], norm(x + delta)[sound])


def test_the_operators_are_sound_for_the_compiler():
    norm, linear = norm_of(16), nn.Linear(16, 24)
    x = torch.randn(5, 16)
    with torch.no_grad():
        torch.library.opcheck(add_layer_norm, (x, x + 1, norm.weight, norm.bias, 1e-6))
        torch.library.opcheck(add_layer_norm, (x, x + 1, norm.weight, None, 1e-6))
        turned = torch.randn(16, 5).t()
        torch.library.opcheck(add_layer_norm, (turned, turned + 1, norm.weight, norm.bias, 1e-6))
        torch.library.opcheck(linear_gelu, (x, linear.weight, linear.bias))
        torch.library.opcheck(add_rms_norm, (x, x + 1, norm.weight, 1e-6))
        torch.library.opcheck(silu_mul, (x, x + 1))
        torch.library.opcheck(silu_mul, (turned, turned + 1))


@torch.no_grad()
def test_plain_modules_are_fused_without_a_difference():
    norm, linear = norm_of(16), nn.Linear(16, 24)
    x, delta = torch.randn(2, 5, 16).unbind(0)
    total, normed = add_norm(x, delta, norm)
    torch.testing.assert_close(total, x + delta)
    torch.testing.assert_close(normed, norm(x + delta))
    for activation in (nn.GELU("tanh"), nn.GELU(), nn.ReLU()):
        torch.testing.assert_close(linear_activation(x, linear, activation), activation(linear(x)))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_rms_norm_is_as_exact_as_its_module(dtype):
    norm = rms_norm_of(72).to(dtype)
    x, delta = torch.randn(2, 5, 72).to(dtype).unbind(0)
    exact = rms_norm_of(72).to(dtype).double()(x.double())
    got = rms_norm(x, norm)
    assert got.dtype == dtype
    assert (got - exact).norm() <= 1.01 * (norm(x) - exact).norm() + 1e-6
    total, normed = add_norm(x, delta, norm)
    assert torch.equal(total, x + delta)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(normed, rms_norm(total, norm), rtol=2 * step, atol=2 * step)


class Doubled(Qwen2RMSNorm):
    """A norm that means something else by its weight."""

    def forward(self, x):
        return 2 * super().forward(x)


@torch.no_grad()
def test_an_rms_norm_that_is_not_plain_is_called():
    x = torch.randn(5, 16)
    for norm in (hooked(rms_norm_of(16)), overridden(rms_norm_of(16)), Doubled(16), nn.RMSNorm(16)):
        assert torch.equal(rms_norm(x, norm), norm(x))
    half = rms_norm_of(16).half()
    assert torch.equal(rms_norm(x, half), half(x))  # the module decides what is cast


def classes_of_transformers(names):
    """Those of these classes that the installed version has, in the files of their families."""
    for family in ("glm4v", "glm4v_moe", "glm5_next", "glm_ocr", "qwen2", "qwen2_5_omni", "qwen2_5_vl"):
        try:
            modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        except ModuleNotFoundError:
            continue
        yield from (getattr(modeling, name) for name in names if hasattr(modeling, name))


@torch.no_grad()
def test_the_classes_that_are_replaced_do_what_replaces_them():
    norms, mlps = ({*classes_of_transformers(names)} for names in (blocks.RMS_NORMS, blocks.SWIGLUS))
    assert len(norms) >= 3
    assert len(mlps) >= 3
    x = torch.randn(5, 16)
    for kind in norms:
        norm = kind(16, eps=0.1)
        norm.weight.normal_()
        expected = norm(x)
        with fused_away(norm) as called:
            torch.testing.assert_close(rms_norm(x, norm), expected)
        assert not called
    config = SimpleNamespace(
        hidden_size=16, intermediate_size=24, out_hidden_size=24, hidden_act="silu", attention_bias=True
    )
    for kind in mlps:
        mlp = kind(config)
        with fused_away(mlp) as called:
            torch.testing.assert_close(swiglu(x, mlp), kind.forward(mlp, x))
        assert not called


@contextmanager
def fused_away(module):
    """Notes whether a module itself is called."""
    called = []
    kind = type(module)
    original = kind.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "__call__", lambda self, *args: called.append(1) or original(self, *args), raising=False)
        yield called


def swiglu_of(act="silu"):
    config = Qwen2_5_VLVisionConfig(hidden_size=16, intermediate_size=24, hidden_act=act)
    torch.manual_seed(0)
    return Qwen2_5_VLMLP(config, bias=True)


@torch.no_grad()
def test_a_plain_swiglu_is_fused_and_any_other_is_called():
    x = torch.randn(5, 16)
    for mlp in (swiglu_of(), swiglu_of("gelu"), hooked(swiglu_of()), overridden(swiglu_of())):
        torch.testing.assert_close(swiglu(x, mlp), mlp(x))
    mlp = swiglu_of()
    mlp.down_proj = PlusOne(24, 16)
    hooked(mlp.gate_proj)
    torch.testing.assert_close(swiglu(x, mlp), mlp(x))


class PlusOne(nn.Linear):
    """A layer that has weights like a plain one, and does something else besides."""

    def forward(self, x):
        return super().forward(x) + 1


@torch.no_grad()
def test_modules_that_are_not_plain_are_called():
    x, linear = torch.randn(5, 16), PlusOne(16, 24)
    expected = F.gelu(linear(x), approximate="tanh")
    assert torch.equal(linear_activation(x, linear, nn.GELU("tanh")), expected)
    norm = nn.LayerNorm(16, bias=False)
    torch.testing.assert_close(add_norm(x, x, norm)[1], norm(2 * x))


class Quantised(torch.Tensor):
    """A weight that only a linear layer can use, as quantisers make them; the layer keeps its type."""

    @staticmethod
    def __new__(cls, weight):
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    def __init__(self, weight):
        self.inner = weight

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            return func(args[0], args[1].inner, *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(func)


def overridden(layer):
    original = layer.forward
    layer.forward = lambda x: original(x) + 1
    return layer


def hooked(layer):
    layer.register_forward_hook(lambda module, args, output: output + 1)
    return layer


def normalised(layer):
    """The weight follows from another parameter, before each forward."""
    with pytest.warns(FutureWarning):
        layer = torch.nn.utils.weight_norm(layer)
    layer.weight_g.mul_(2)
    return layer


def parametrised(layer):
    torch.nn.utils.parametrizations.weight_norm(layer)
    return layer


def quantised(layer):
    layer.weight = nn.Parameter(Quantised(layer.weight.data), requires_grad=False)
    return layer


@torch.no_grad()
@pytest.mark.parametrize("change", [overridden, hooked, normalised, parametrised, quantised])
def test_what_is_done_to_a_plain_layer_is_seen(change):
    x, linear = torch.randn(5, 16), change(nn.Linear(16, 24))
    expected = F.gelu(linear(x), approximate="tanh")
    torch.testing.assert_close(linear_activation(x, linear, nn.GELU("tanh")), expected)


@torch.no_grad()
@pytest.mark.parametrize("change", [overridden, hooked])
def test_what_is_done_to_a_plain_norm_is_seen(change):
    x, norm = torch.randn(5, 16), change(norm_of(16))
    assert torch.equal(add_norm(x, x, norm)[1], norm(2 * x))


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("change", [lambda layer: layer, overridden, hooked])
@pytest.mark.parametrize(("kind", "kernel"), [(nn.Conv2d, (2, 2)), (nn.Conv3d, (2, 3, 4))])
def test_a_convolution_of_whole_patches_is_the_convolution(kind, kernel, change, bias):
    conv = change(kind(3, 16, kernel, stride=kernel, bias=bias))
    patches = torch.randn(5, 3, *kernel)
    torch.testing.assert_close(patch_convolution(patches.flatten(1), conv), conv(patches).flatten(1))


@torch.no_grad()
def test_a_sum_of_two_dtypes_is_promoted_as_it_is_otherwise():
    x, delta = torch.randn(5, 16).bfloat16(), torch.randn(5, 16)
    norm = nn.LayerNorm(16)
    total, normed = add_norm(x, delta, norm)
    assert torch.equal(total, x + delta)
    assert torch.equal(normed, norm(x + delta))


@torch.no_grad()
@pytest.mark.parametrize("fused", [True, False])
def test_the_compiler_sees_what_is_plain(fused):
    linear = nn.Linear(16, 24) if fused else hooked(nn.Linear(16, 24))
    seen = []

    def backend(graph, inputs):
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    x, compiled = torch.randn(5, 16), torch.compile(linear_activation, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x, linear, nn.GELU("tanh")), F.gelu(linear(x), approximate="tanh"))
    assert (linear_gelu in seen) is fused


@torch.no_grad()
def test_under_autocast_the_layers_decide_what_is_cast():
    x, linear = torch.randn(5, 16), nn.Linear(16, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear_activation(x, linear, nn.GELU("tanh")).dtype == torch.bfloat16
