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

RMS_NORMS = ("Qwen2_5_VLRMSNorm", "Qwen2_5OmniRMSNorm", "Qwen2RMSNorm")
"""Classes of transformers that are an RMS norm times their weight, and round in between."""


def add_norm(x: Tensor, delta: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """`x + delta` and its norm, `[rows, dim]` each: one pass over memory for a layer norm, two for an RMS norm."""
    if is_plain(norm, nn.LayerNorm) and _as_is(x, delta, norm.weight, norm.bias):
        total, normed = add_layer_norm(x, delta, norm.weight, norm.bias, norm.eps)
    else:
        total = x + delta
        normed = rms_norm(total, norm)
    return total, normed


def rms_norm(x: Tensor, norm: Any) -> Tensor:
    """`norm(x)`, `[rows, dim]`: one pass over memory for a plain RMS norm, which then rounds once."""
    if type(norm).__name__ in RMS_NORMS and is_plain(norm, type(norm)) and _as_is(x, norm.weight):
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
    out: Tensor = norm(x)
    return out


def embed_patches(patch_embed: Any, rows: Tensor) -> Tensor:
    """A convolution of patches, whose stride is its kernel, as the matrix product it is: `[rows, dim]`."""
    proj = patch_embed.proj
    if not is_plain(proj, nn.Conv3d):
        out: Tensor = patch_embed(rows)
        return out
    return F.linear(rows, proj.weight.flatten(1), proj.bias)


def project_qkv(attn: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[rows, heads, dim]`, where they lie in a packed projection."""
    q, k, v = rearrange(attn.qkv(x), "rows (three heads dim) -> three rows heads dim", three=3, heads=attn.num_heads)
    return q, k, v


def linear_activation(x: Tensor, linear: Any, activation: Any) -> Tensor:
    """`activation(linear(x))`: one matrix product for a plain linear layer and a GELU by tanh."""
    if is_plain(linear, nn.Linear) and _is_tanh_gelu(activation) and _as_is(x, linear.weight, linear.bias):
        out: Tensor = linear_gelu(x, linear.weight, linear.bias)
    else:
        out = activation(linear(x))
    return out


def is_plain(module: Any, kind: type[nn.Module]) -> bool:
    """Whether a module is just what its type says: no hooks (`weight_norm` is one), no forward or weights of its own.

    Quantisers leave `nn.Linear` as it is and make its weight a tensor of another type.
    """
    if type(module) is not kind or "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return False
    bias = getattr(module, "bias", None)
    return type(module.weight) is nn.Parameter and (bias is None or type(bias) is nn.Parameter)


def _as_is(x: Tensor, *others: Tensor | None) -> bool:
    """Whether all are there, and nothing is cast on the way: under autocast the layers themselves know what is."""
    same = all(other is not None and x.dtype == other.dtype for other in others)
    return same and not torch.is_autocast_enabled(x.device.type)


def _is_tanh_gelu(activation: Any) -> bool:
    """Whether this is `nn.GELU("tanh")`, or transformers' class for it, under any of its names."""
    if type(activation) is nn.GELU:
        return activation.approximate == "tanh"
    return type(activation).__name__ in ("GELUTanh", "PytorchGELUTanh")
