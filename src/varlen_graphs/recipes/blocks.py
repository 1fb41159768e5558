"""Parts of transformer blocks that recipes share: fused where a module is what it says, called as it is otherwise.

Adapters and quantisers put modules or weights of their own in the places of plain ones, and others hook or override the
forward of a module. Those are called: an operator takes the place only of a module that does nothing but what its exact
type says, on weights that are plain parameters.
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from varlen_graphs.kernels.layer_norm.op import add_layer_norm
from varlen_graphs.kernels.linear_gelu.op import linear_gelu


def add_norm(x: Tensor, delta: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """`x + delta` and its norm, `[rows, dim]` each: one pass over memory for a plain layer norm."""
    if is_plain(norm, nn.LayerNorm) and _as_is(x, delta, norm.weight, norm.bias):
        total, normed = add_layer_norm(x, delta, norm.weight, norm.bias, norm.eps)
    else:
        total = x + delta
        normed = norm(total)
    return total, normed


def linear_activation(x: Tensor, linear: Any, activation: Any) -> Tensor:
    """`activation(linear(x))`: one matrix product for a plain linear layer and a GELU by tanh."""
    if is_plain(linear, nn.Linear) and _is_tanh_gelu(activation) and _as_is(x, linear.weight, linear.bias):
        out: Tensor = linear_gelu(x, linear.weight, linear.bias)
    else:
        out = activation(linear(x))
    return out


def patch_convolution(patches: Tensor, conv: Any) -> Tensor:
    """A convolution of whole patches, its stride its kernel: `[patches, out]`, one matrix product for a plain one.

    Args:
        patches: `[patches, channels * kernel]`, each laid out as the weight of the convolution is.
        conv: `nn.Conv2d` or `nn.Conv3d`, or what stands in its place.
    """
    if is_plain(conv, nn.Conv2d) or is_plain(conv, nn.Conv3d):
        return F.linear(patches, conv.weight.flatten(1), conv.bias)
    out: Tensor = conv(patches.unflatten(1, conv.weight.shape[1:]))
    return out.flatten(1)


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[rows, heads, dim]`, where they lie in their packed projection `[rows, width]`."""
    q, k, v = rearrange(qkv, "rows (three heads dim) -> three rows heads dim", three=3, heads=heads)
    return q, k, v


def is_plain(module: Any, kind: type[nn.Module]) -> bool:
    """Whether a module is just what its type says: no hooks (`weight_norm` is one), no forward or weights of its own.

    Quantisers leave `nn.Linear` as it is and make its weight a tensor of another type.
    """
    if type(module) is not kind or "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return False
    return type(module.weight) is type(module.bias) is nn.Parameter


def _as_is(x: Tensor, *others: Tensor) -> bool:
    """Whether nothing is cast on the way: under autocast the layers themselves know what is."""
    return all(x.dtype == other.dtype for other in others) and not torch.is_autocast_enabled(x.device.type)


def _is_tanh_gelu(activation: Any) -> bool:
    """Whether this is `nn.GELU("tanh")`, or transformers' class for it, under any of its names."""
    if type(activation) is nn.GELU:
        return activation.approximate == "tanh"
    return type(activation).__name__ in ("GELUTanh", "PytorchGELUTanh")
