"""Backend `"reference"`: plain torch operations, for any device and dtype."""

from itertools import pairwise

from torch import Tensor

from varlen_graphs.attention.inputs import AttentionInputs
from varlen_graphs.attention.kernel.reference import varlen_attention
from varlen_graphs.errors import InputError, counted


def refusal(inputs: AttentionInputs, compiles: bool) -> str | None:
    """Return `None`: all inputs are supported."""
    return None


def run(inputs: AttentionInputs) -> Tensor:
    """Run the reference. Padding rows affect no other row, and are zero in the output.

    Raises:
        InputError: Boundaries on the CPU are not those of segments of the rows. Elsewhere a look at them would sync.
    """
    if inputs.q.device.type == "cpu":
        _check_boundaries("cu_seqlens", inputs.cu_seqlens_q, "q", len(inputs.q), "max_seqlen", inputs.max_seqlen_q)
        _check_boundaries("cu_seqlens_k", inputs.cu_seqlens_k, "k", len(inputs.k), "max_seqlen_k", inputs.max_seqlen_k)
    return varlen_attention(
        inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.scale, inputs.left, inputs.right,
        inputs.bias,
    )  # fmt: skip


def _check_boundaries(name: str, cu_seqlens: Tensor, of: str, rows: int, bound: str, longest: int) -> None:
    values = cu_seqlens.tolist()
    if values[0] != 0 or values[-1] > rows:
        raise InputError(
            f"{name} goes from {values[0]} to {values[-1]}, but {of} has {counted(rows, 'row')}: expected boundaries "
            "that start at 0 and end at no more than that"
        )
    for index, (start, end) in enumerate(pairwise(values)):
        if not 0 <= end - start <= longest:
            what = f"{name}[{index}:{index + 2}] is {[start, end]}"
            if end < start:
                raise InputError(f"{what}: expected boundaries that never fall; for an empty segment, repeat one")
            raise InputError(
                f"{what}, a segment of {counted(end - start, 'row')}, but {bound}={longest}: expected an upper bound "
                "on the rows of the longest segment"
            )
