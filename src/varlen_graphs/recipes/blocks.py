"""Parts of transformer blocks that recipes share: fused where a module is what it says, called as it is otherwise.

Adapters and quantisers put modules of their own in the places of plain ones. Those are called; only modules whose exact
type is known are replaced by an operator on their weights.
"""

from typing import Any

import torch
from torch import Tensor, nn

from varlen_graphs.kernels.layer_norm.op import add_layer_norm
from varlen_graphs.kernels.linear_gelu.op import linear_gelu


def add_norm(x: Tensor, delta: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """`x + delta` and its norm, `[rows, dim]` each: one pass over memory for a plain layer norm."""
    if type(norm) is nn.LayerNorm and norm.bias is not None and _as_is(x, norm.weight):
        total, normed = add_layer_norm(x, delta, norm.weight, norm.bias, norm.eps)
    else:
        total = x + delta
        normed = norm(total)
    return total, normed


def linear_activation(x: Tensor, linear: Any, activation: Any) -> Tensor:
    """`activation(linear(x))`: one matrix product for a plain linear layer and a GELU by tanh."""
    if type(linear) is nn.Linear and linear.bias is not None and _is_tanh_gelu(activation) and _as_is(x, linear.weight):
        out: Tensor = linear_gelu(x, linear.weight, linear.bias)
    else:
        out = activation(linear(x))
    return out


def _as_is(x: Tensor, weight: Tensor) -> bool:
    """Whether nothing is cast on the way: under autocast the layers themselves know what is."""
    return x.dtype == weight.dtype and not torch.is_autocast_enabled(x.device.type)


def _is_tanh_gelu(activation: Any) -> bool:
    """Whether this is `nn.GELU("tanh")`, or transformers' class for it, under any of its names."""
    if type(activation) is nn.GELU:
        return activation.approximate == "tanh"
    return type(activation).__name__ in ("GELUTanh", "PytorchGELUTanh")
