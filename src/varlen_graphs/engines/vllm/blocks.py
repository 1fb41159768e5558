"""Transformer blocks of vLLM's vision towers, as the parts that recipes run: plain layers by their weights.

Layers that are quantised, adapted, hooked or replaced compute something of their own, and are called.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from vllm.model_executor.layers.conv import Conv2dLayer, Conv3dLayer
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.parameter import ModelWeightParameter

from varlen_graphs.recipes.blocks import LinearWeights, RMSNormWeights, linear_activation, runs_own_forward

LINEARS = (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear)
"""Layers that compute a plain product if they are neither quantised nor sharded."""

Layer = Callable[[Tensor], Tensor]


class AttentionParts(NamedTuple):
    """Attention of a block, as `run_block` of the recipes takes it."""

    qkv: Layer
    proj: Layer
    num_heads: int
    head_dim: int
    scaling: float


class BlockParts(NamedTuple):
    """A block, as `run_block` of the recipes takes it."""

    norm1: Layer
    norm2: Layer
    attn: AttentionParts
    mlp: Any


def blocks_of(tower: Any) -> list[BlockParts]:
    """Return the blocks of a tower."""
    return [BlockParts(norm(one.norm1), norm(one.norm2), _attention(one.attn), one.mlp) for one in tower.blocks]


def _attention(attn: Any) -> AttentionParts:
    core = attn.attn
    return AttentionParts(linear(attn.qkv), linear(attn.proj), core.num_heads, core.head_size, core.scale)


def mlp(x: Tensor, layers: Any) -> Tensor:
    """Return the MLP of a block of rows `[rows, dim]`: of Qwen3-VL, or a SwiGLU with one product for gate and up."""
    if hasattr(layers, "gate_up_proj"):
        return linear(layers.down_proj)(layers.act_fn(linear(layers.gate_up_proj)(x)))
    return linear(layers.linear_fc2)(linear_activation(x, linear(layers.linear_fc1), layers.act_fn))


def linear(layer: Any) -> Layer:
    """Return what computes the product of a linear layer, without the bias that some of vLLM's return beside it."""
    if _is_plain_linear(layer):
        return LinearWeights(layer.weight, layer.bias)
    return partial(_product, layer)


def norm(layer: Any) -> Layer:
    """Return an RMS norm by its weight, if it is a plain one, and any other norm as it is."""
    if type(layer) is RMSNorm and _is_plain(layer) and layer.has_weight and layer.variance_size_override is None:
        return RMSNormWeights(layer.weight, layer.variance_epsilon)
    called: Layer = layer
    return called


def patch_convolution(patches: Tensor, conv: Any) -> Tensor:
    """Convolve patches `[patches, channels * kernel]` to `[patches, out]`; a plain convolution is a product."""
    if type(conv) in (Conv2dLayer, Conv3dLayer) and _is_plain(conv) and conv.enable_linear:
        return LinearWeights(conv.weight.flatten(1), conv.bias)(patches)
    out: Tensor = conv(patches.unflatten(1, conv.weight.shape[1:]))
    return out.flatten(1)


def called_layers(tower: nn.Module) -> list[str]:
    """Return the paths of linear layers of the blocks that graphs call as they are, because they are no plain ones."""
    layers = [(path, one) for path, one in tower.named_modules() if path.startswith("blocks.")]
    return [path for path, one in layers if isinstance(one, LinearBase) and not _is_plain_linear(one)]


def _is_plain_linear(layer: Any) -> bool:
    if type(layer) not in LINEARS or type(layer.quant_method) is not UnquantizedLinearMethod:
        return False
    whole = layer.tp_size == 1 and not layer.skip_bias_add
    return whole and _is_plain(layer) and layer.weight.shape == (layer.output_size, layer.input_size)


def _is_plain(layer: Any) -> bool:
    """Return True if a layer runs the forward of its class on weights in the form that vLLM has loaded them in."""
    return runs_own_forward(layer) and type(layer.weight) in (nn.Parameter, ModelWeightParameter)


def _product(layer: Any, x: Tensor) -> Tensor:
    out = layer(x)
    product: Tensor = out[0] if isinstance(out, tuple) else out
    return product
