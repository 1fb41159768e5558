"""Parts of transformer blocks that recipes share: fused where a module is what it says, called as it is otherwise.

Adapters and quantisers put modules or weights of their own in the places of plain ones, and others hook or override the
forward of a module. Those are called: an operator takes the place only of a module that does nothing but what its exact
type says, on weights that are plain parameters.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from varlen_graphs.errors import SpecError
from varlen_graphs.kernels.layer_norm.op import add_layer_norm
from varlen_graphs.kernels.linear_gelu.op import linear_gelu
from varlen_graphs.kernels.rms_norm.op import add_rms_norm
from varlen_graphs.kernels.silu_mul.op import silu_mul

RMS_NORMS = (
    "Glm4vMoeRMSNorm", "Glm4vRMSNorm", "Glm5NextRMSNorm", "GlmOcrRMSNorm", "Qwen2RMSNorm", "Qwen2_5OmniRMSNorm",
    "Qwen2_5_VLRMSNorm",
)  # fmt: skip
"""Classes of transformers that are an RMS norm times their weight, and round in between."""

SWIGLUS = (
    "Glm4VisionMlp", "Glm4vMoeisionMlp", "GlmOcrVisionMlp", "Qwen2_5OmniMLP", "Qwen2_5_VLMLP",
)  # fmt: skip
"""Classes of transformers that are `down_proj(act_fn(gate_proj(x)) * up_proj(x))`."""


def add_norm(x: Tensor, delta: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """`x + delta` and its norm, `[rows, dim]` each: one pass over memory for a plain layer norm or RMS norm."""
    if is_plain(norm, nn.LayerNorm) and _as_is(x, delta, norm.weight, norm.bias):
        total, normed = add_layer_norm(x, delta, norm.weight, norm.bias, norm.eps)
    elif _is_rms_norm(norm) and _as_is(x, delta, norm.weight):
        total, normed = add_rms_norm(x, delta, norm.weight, norm.variance_epsilon)
    else:
        total = x + delta
        normed = norm(total)
    return total, normed


def rms_norm(x: Tensor, norm: Any) -> Tensor:
    """`norm(x)`, `[rows, dim]`: one pass over memory for a plain RMS norm, which then rounds once."""
    if _is_rms_norm(norm) and _as_is(x, norm.weight):
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
    out: Tensor = norm(x)
    return out


def swiglu(x: Tensor, mlp: Any) -> Tensor:
    """`mlp(x)`: one pass over memory between the products of a plain SwiGLU."""
    if type(mlp).__name__ in SWIGLUS and _is_called_as_is(mlp) and _is_silu(mlp.act_fn):
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        out: Tensor = mlp.down_proj(silu_mul(gate, up) if _as_is(gate, up) else mlp.act_fn(gate) * up)
    else:
        out = mlp(x)
    return out


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


def split_heads(qkv: Tensor, heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[rows, heads, dim]`, where they lie in their packed projection `[rows, width]`.

    Raises:
        SpecError: The projection is of another width: it was sharded, and the number of heads was not.
    """
    _check_heads(qkv, 3, heads, dim)
    q, k, v = rearrange(qkv, "rows (three heads dim) -> three rows heads dim", three=3, heads=heads)
    return q, k, v


def project_heads(x: Tensor, projections: Sequence[Any], heads: int, dim: int) -> list[Tensor]:
    """What each projection makes of `x` `[rows, width]`, by heads: `[rows, heads, dim]` each.

    Raises:
        SpecError: A projection is of another width: it was sharded, and the number of heads was not.
    """
    projected = [project(x) for project in projections]
    for each in projected:
        _check_heads(each, 1, heads, dim)
    return [rearrange(each, "rows (heads dim) -> rows heads dim", heads=heads) for each in projected]


def _check_heads(projected: Tensor, parts: int, heads: int, dim: int) -> None:
    if projected.shape[-1] != parts * heads * dim:
        raise SpecError(
            f"a projection is {projected.shape[-1]} wide: expected {parts} times {heads} heads of {dim}; where it is "
            "sharded, each rank must have whole heads, and num_heads of the attention must be how many: "
            "parallelize_module(tower, mesh, vg.parallel.tensor_plan(tower)) does both"
        )


def is_plain(module: Any, kind: type[nn.Module]) -> bool:
    """Whether a module is just what its type says: no hooks (`weight_norm` is one), no forward or weights of its own.

    Quantisers leave `nn.Linear` as it is and make its weight a tensor of another type.
    """
    if type(module) is not kind or not _is_called_as_is(module):
        return False
    bias = getattr(module, "bias", None)
    return type(module.weight) is nn.Parameter and (bias is None or type(bias) is nn.Parameter)


def _is_called_as_is(module: Any) -> bool:
    """Whether calling a module runs the forward of its class and nothing else."""
    return not ("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def _is_rms_norm(norm: Any) -> bool:
    return type(norm).__name__ in RMS_NORMS and is_plain(norm, type(norm))


def _is_silu(activation: Any) -> bool:
    return type(activation) is nn.SiLU or type(activation).__name__ == "SiLUActivation"


def _as_is(x: Tensor, *others: Tensor | None) -> bool:
    """Whether all are there, and nothing is cast on the way: under autocast the layers themselves know what is."""
    same = all(other is not None and x.dtype == other.dtype for other in others)
    return same and not torch.is_autocast_enabled(x.device.type)


def _is_tanh_gelu(activation: Any) -> bool:
    """Whether this is `nn.GELU("tanh")`, or transformers' class for it, under any of its names."""
    if type(activation) is nn.GELU:
        return activation.approximate == "tanh"
    return type(activation).__name__ in ("GELUTanh", "PytorchGELUTanh")
