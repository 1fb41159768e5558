"""Parts of transformer blocks that recipes share: fused operations for plain modules, plain calls for all others.

Adapters and quantisers replace modules or their weights, and other code hooks or overrides a module's forward. Such
modules are called. A fused operation replaces only a module of the exact type it is written for, with no hooks, no
forward of its own, and weights that are plain parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from varlen_graphs.attention.api import TileSchedule, varlen_attention
from varlen_graphs.attention.backends import AttentionBackend
from varlen_graphs.capture.parts import records_outputs
from varlen_graphs.errors import SpecError
from varlen_graphs.kernels.layer_norm.op import add_layer_norm
from varlen_graphs.kernels.linear_gelu.op import linear_gelu
from varlen_graphs.kernels.rms_norm.op import add_rms_norm
from varlen_graphs.kernels.rotary.op import apply_rotary
from varlen_graphs.kernels.silu_mul.op import silu_mul

RMS_NORMS = (
    "Glm4vMoeRMSNorm", "Glm4vRMSNorm", "Glm5NextRMSNorm", "GlmOcrRMSNorm", "Lfm3VlVisionRMSNorm", "LlamaRMSNorm",
    "MistralRMSNorm", "PixtralRMSNorm", "Qwen2RMSNorm", "Qwen2_5OmniRMSNorm", "Qwen2_5_VLRMSNorm", "Qwen3RMSNorm",
)  # fmt: skip
"""Classes of transformers that compute an RMS norm, round it, and multiply it by their weight."""

SWIGLUS = (
    "Glm4VisionMlp", "Glm4vMoeisionMlp", "GlmOcrVisionMlp", "LlamaMLP", "MistralMLP", "PixtralMLP", "Qwen2MLP",
    "Qwen2_5OmniMLP", "Qwen2_5_VLMLP", "Qwen3MLP",
)  # fmt: skip
"""Classes of transformers that compute `down_proj(act_fn(gate_proj(x)) * up_proj(x))`."""


@dataclass(frozen=True)
class LinearWeights:
    """A plain linear layer by its weights, for layers of engines that compute one: fused as an `nn.Linear` is."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product with `x` `[rows, dim]`, and the bias added."""
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class RMSNormWeights:
    """A plain RMS norm by its weight, for norms of engines that compute one."""

    weight: Tensor
    variance_epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of `x` `[rows, dim]`."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


def add_norm(x: Tensor, delta: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """Return `x + delta` and `norm(x + delta)`, in one pass over memory if `norm` is a plain layer norm or RMS norm.

    If `norm` is `None`, both are the sum.
    """
    if norm is None:
        total = normed = x + delta
    elif is_plain(norm, nn.LayerNorm) and _same_dtype(x, delta, *norm.parameters()):
        total, normed = add_layer_norm(x, delta, norm.weight, norm.bias, norm.eps)
    elif _is_rms_norm(norm) and _same_dtype(x, delta, norm.weight):
        total, normed = add_rms_norm(x, delta, norm.weight, norm.variance_epsilon)
    else:
        total = x + delta
        normed = norm(total)
    return total, normed


def rms_norm(x: Tensor, norm: Any) -> Tensor:
    """Return `norm(x)` for `x` `[..., dim]`; a plain RMS norm makes one pass over memory and rounds once."""
    if _is_rms_norm(norm) and _same_dtype(x, norm.weight):
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
    out: Tensor = norm(x)
    return out


def swiglu(x: Tensor, mlp: Any) -> Tensor:
    """Return `mlp(x)` for `x` `[rows, dim]`; a plain SwiGLU makes one pass over memory between its matrix products."""
    if type(mlp).__name__ in SWIGLUS and runs_own_forward(mlp) and _is_silu(mlp.act_fn):
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        out: Tensor = mlp.down_proj(silu_mul(gate, up) if _same_dtype(gate, up) else mlp.act_fn(gate) * up)
    else:
        out = mlp(x)
    return out


def linear_activation(x: Tensor, linear: Any, activation: Any) -> Tensor:
    """Return `activation(linear(x))`; a plain linear layer and a tanh GELU become one matrix product."""
    plain = type(linear) is LinearWeights or is_plain(linear, nn.Linear)
    if plain and _is_tanh_gelu(activation) and _same_dtype(x, linear.weight, linear.bias):
        out: Tensor = linear_gelu(x, linear.weight, linear.bias)
    else:
        out = activation(linear(x))
    return out


def siglip_layers(
    layers: Any, x: Tensor, last: Any, cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule,
    backend: AttentionBackend, *, rotary: tuple[Tensor, Tensor] | None = None, states: list[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Run the layers of a SigLIP transformer over rows `[rows, dim]`, and return the norm `last` of their output.

    Without `last`, the output itself is returned. `rotary` rotates queries and keys. `states`, if given, receives the
    input of the first layer and the output of each.
    """
    recorded = [] if states is None else states
    recorded.append(x)
    normed: Tensor = layers[0].layer_norm1(x)
    for layer, next_norm in zip(layers, [*(layer.layer_norm1 for layer in layers[1:]), last], strict=True):
        attn, mlp = layer.self_attn, layer.mlp
        q, k, v = project_heads(normed, (attn.q_proj, attn.k_proj, attn.v_proj), attn.num_heads, attn.head_dim)
        if rotary is not None:
            q, k = apply_rotary(q, k, *rotary)
        scale = attn.scale if hasattr(attn, "scale") else attn.scaling
        attended = varlen_attention(q, k, v, cu_seqlens, max_seqlen, scale=scale, schedule=schedule, backend=backend)
        project = attn.out_proj if hasattr(attn, "out_proj") else attn.o_proj
        change = project(rearrange(attended, "rows heads dim -> rows (heads dim)"))
        x, normed = add_norm(x, change, layer.layer_norm2)
        x, normed = add_norm(x, mlp.fc2(linear_activation(normed, mlp.fc1, mlp.activation_fn)), next_norm)
        recorded.append(x)
    return normed


def whisper_layers(
    layers: Any, x: Tensor, last: Any, cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule,
    backend: AttentionBackend, *, states: list[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Run the layers of a Whisper encoder over tokens `[tokens, dim]`, and return the norm `last` of their output.

    `states`, if given, receives the input of the first layer and the output of each.
    """
    recorded = [] if states is None else states
    recorded.append(x)
    normed: Tensor = layers[0].self_attn_layer_norm(x)
    following = [*(layer.self_attn_layer_norm for layer in layers[1:]), last]
    for layer, next_norm in zip(layers, following, strict=True):
        attn = layer.self_attn
        q, k, v = project_heads(normed, (attn.q_proj, attn.k_proj, attn.v_proj), attn.num_heads, attn.head_dim)
        attended = varlen_attention(
            q, k, v, cu_seqlens, max_seqlen, scale=attn.scaling, schedule=schedule, backend=backend
        )
        change = attn.out_proj(rearrange(attended, "tokens heads dim -> tokens (heads dim)"))
        x, normed = add_norm(x, change, layer.final_layer_norm)
        change = layer.fc2(linear_activation(normed, layer.fc1, layer.activation_fn))
        x, normed = _add_norm_in_range(x, change, next_norm)
        recorded.append(x)
    return normed


def _add_norm_in_range(x: Tensor, change: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """Return `x + change` and its norm; in float16 the sum is clamped, as the layers of Whisper do."""
    if x.dtype != torch.float16:
        return add_norm(x, change, norm)
    limit = torch.finfo(x.dtype).max - 1000
    x = (x + change).clamp(-limit, limit)
    return x, norm(x)


def patch_convolution(patches: Tensor, conv: Any) -> Tensor:
    """Convolve patches `[patches, channels * kernel]` to `[patches, out]`; a plain convolution is a matrix product."""
    if is_plain(conv, nn.Conv2d) or is_plain(conv, nn.Conv3d):
        return F.linear(patches, conv.weight.flatten(1), conv.bias)
    out: Tensor = conv(patches.unflatten(1, conv.weight.shape[1:]))
    return out.flatten(1)


def split_heads(qkv: Tensor, heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split a packed projection `[rows, 3 * heads * dim]` into views of queries, keys and values."""
    _check_heads(qkv, 3, heads, dim)
    q, k, v = rearrange(qkv, "rows (three heads dim) -> three rows heads dim", three=3, heads=heads)
    return q, k, v


def project_heads(x: Tensor, projections: Sequence[Any], heads: int, dim: int) -> list[Tensor]:
    """Project rows, and split each projection into heads `[rows, heads, dim]`."""
    projected = [project(x) for project in projections]
    for each in projected:
        _check_heads(each, 1, heads, dim)
    return [rearrange(each, "rows (heads dim) -> rows heads dim", heads=heads) for each in projected]


def _check_heads(projected: Tensor, parts: int, heads: int, dim: int) -> None:
    if projected.shape[-1] != parts * heads * dim:
        raise SpecError(
            f"a projection is {projected.shape[-1]} wide: expected {parts} x {heads} heads of {dim} channels; if it is "
            "sharded, each rank needs whole heads, and num_heads of the attention must count those of the rank: "
            "parallelize_module(tower, mesh, vg.parallel.tensor_plan(tower)) does both"
        )


def is_plain(module: Any, kind: type[nn.Module]) -> bool:
    """Return True if a module is exactly of `kind`, with no hooks, no forward of its own, and plain parameters."""
    # `weight_norm` is a hook. Quantisers keep `nn.Linear` and replace its weight by a tensor subclass.
    if type(module) is not kind or not runs_own_forward(module):
        return False
    bias = getattr(module, "bias", None)
    return type(module.weight) is nn.Parameter and (bias is None or type(bias) is nn.Parameter)


def runs_own_forward(module: Any) -> bool:
    """Return True if calling a module runs the forward of its class, and no hooks but those that record outputs."""
    own = vars(module).get("forward")  # where `vg.wrap` puts what stands for that of the class
    is_of_class = own is None or getattr(own, "is_of_class", False)
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return is_of_class and all(map(records_outputs, hooks))


def _is_rms_norm(norm: Any) -> bool:
    return type(norm) is RMSNormWeights or (type(norm).__name__ in RMS_NORMS and is_plain(norm, type(norm)))


def _is_silu(activation: Any) -> bool:
    return type(activation) is nn.SiLU or type(activation).__name__ == "SiLUActivation"


def _same_dtype(x: Tensor, *others: Tensor | None) -> bool:
    """Return True if no tensor is missing and none needs a cast; under autocast the layers themselves cast."""
    same = all(other is not None and x.dtype == other.dtype for other in others)
    return same and not torch.is_autocast_enabled(x.device.type)


def _is_tanh_gelu(activation: Any) -> bool:
    """Return True for `nn.GELU("tanh")` and for transformers' class of it, under any of its names."""
    if type(activation) is nn.GELU:
        return activation.approximate == "tanh"
    return type(activation).__name__ in ("GELUTanh", "PytorchGELUTanh")
