"""Backend `"reference"`: plain torch operations, for any device and dtype."""

from torch import Tensor

from varlen_graphs.attention.inputs import AttentionInputs
from varlen_graphs.attention.kernel.reference import varlen_attention


def refusal(inputs: AttentionInputs, compiles: bool) -> str | None:
    """Return `None`: all inputs are supported."""
    return None


def run(inputs: AttentionInputs) -> Tensor:
    """Run the reference. Padding rows affect no other row, and are zero in the output."""
    return varlen_attention(
        inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.scale, inputs.left, inputs.right,
        inputs.bias,
    )  # fmt: skip
