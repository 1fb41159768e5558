"""The fused parts of transformer blocks: kernels against their references, and the modules they must not replace."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from varlen_graphs.kernels.layer_norm import reference
from varlen_graphs.kernels.layer_norm import triton as kernel
from varlen_graphs.kernels.layer_norm.op import add_layer_norm
from varlen_graphs.kernels.linear_gelu.op import linear_gelu
from varlen_graphs.recipes.blocks import add_norm, linear_activation, patch_convolution

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


def norm_of(dim, seed=0):
    torch.manual_seed(seed)
    norm = nn.LayerNorm(dim, eps=1e-6)
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    return norm


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "dim"), [(0, 8), (1, 1), (3, 72), (5, 128), (2, 1152)])
def test_the_sum_and_its_norm_in_one_pass(rows, dim, dtype):
    norm = norm_of(dim).to(dtype)
    x, delta = torch.randn(2, rows, dim).to(dtype).unbind(0)
    total, normed = kernel.add_layer_norm(x, delta, norm.weight, norm.bias, norm.eps)
    expected = reference.add_layer_norm(x, delta, norm.weight, norm.bias, norm.eps)
    # The interpreter rounds to bfloat16 towards zero, so the sum may be one step off, and its norm two.
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(total, expected[0], rtol=step, atol=step)
    torch.testing.assert_close(normed, expected[1], rtol=4 * step, atol=4 * step)


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
        turned = torch.randn(16, 5).t()
        torch.library.opcheck(add_layer_norm, (turned, turned + 1, norm.weight, norm.bias, 1e-6))
        torch.library.opcheck(linear_gelu, (x, linear.weight, linear.bias))


@torch.no_grad()
def test_plain_modules_are_fused_without_a_difference():
    norm, linear = norm_of(16), nn.Linear(16, 24)
    x, delta = torch.randn(2, 5, 16).unbind(0)
    total, normed = add_norm(x, delta, norm)
    torch.testing.assert_close(total, x + delta)
    torch.testing.assert_close(normed, norm(x + delta))
    for activation in (nn.GELU("tanh"), nn.GELU(), nn.ReLU()):
        torch.testing.assert_close(linear_activation(x, linear, activation), activation(linear(x)))


class Adapted(nn.Linear):
    """A layer that has weights like a plain one, and does something else besides."""

    def forward(self, x):
        return super().forward(x) + 1


@torch.no_grad()
def test_modules_that_are_not_plain_are_called():
    x, linear = torch.randn(5, 16), Adapted(16, 24)
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
