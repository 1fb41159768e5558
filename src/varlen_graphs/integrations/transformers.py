"""Our attention inside unmodified transformers models."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from einops import rearrange
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from varlen_graphs.attention import varlen_attention
from varlen_graphs.errors import InputError

ATTENTION = "varlen_graphs_flash"
"""The name of our attention there. Transformers 5 hands `cu_seqlens` to any attention with "flash" in its name."""

_EXACT_NAME = "flash_attention_2"
"""The only name that transformers 4.57 hands `cu_seqlens` to."""


def flash_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`varlen_attention` with the signature of transformers' attention functions.

    Args:
        module: The attention module; unused.
        query: `[1, heads, rows, head_dim]`.
        key: As `query`.
        value: As `query`.
        attention_mask: Must be `None`: segments say what attends to what.
        scaling: Factor on the scores.
        cu_seq_lens_q: int32 `[segments + 1]`.
        max_length_q: Rows of the longest segment. A tensor (transformers 4.57) is replaced by the number of rows, an
            upper bound that needs no host sync.
        **kwargs: What else transformers passes (dropout, is_causal, the lengths of keys) must be as in inference over
            packed rows.

    Returns:
        `[1, rows, heads, head_dim]`, and no weights.

    Raises:
        InputError: A padded batch, a mask, or causal attention.
    """
    if query.shape[0] != 1 or cu_seq_lens_q is None or attention_mask is not None or kwargs.get("is_causal"):
        raise InputError(
            f"{ATTENTION} got query {list(query.shape)}, cu_seq_lens_q {cu_seq_lens_q is not None}, attention_mask "
            f"{attention_mask is not None}, is_causal {kwargs.get('is_causal')}: expected packed rows [1, heads, rows, "
            "head_dim] with cu_seq_lens_q, no mask and not causal; use it for vision towers that pack their items"
        )
    q, k, v = (rearrange(x, "1 heads rows dim -> rows heads dim") for x in (query, key, value))
    longest = max_length_q if isinstance(max_length_q, int) else q.shape[0]
    return varlen_attention(q, k, v, cu_seq_lens_q, longest, scale=scaling)[None], None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, flash_attention)


@contextmanager
def use_attention(module: Any) -> Iterator[None]:
    """Run a transformers model on `varlen_attention` inside a `with` block, unmodified.

    Sets the attention through the property of the config, because `set_attn_implementation` looks for an unknown name
    with "flash" in it on the hub. On transformers 4.57, which knows one name only, that name means our attention inside
    the block, for the whole process.

    Args:
        module: A model or tower with a `config`.
    """
    config = module.config
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    patched = not _any_flash_name()
    if patched:
        config._attn_implementation = _EXACT_NAME
        original = ALL_ATTENTION_FUNCTIONS[_EXACT_NAME]
        ALL_ATTENTION_FUNCTIONS[_EXACT_NAME] = flash_attention
    try:
        yield
    finally:
        config._attn_implementation = before
        if patched:
            ALL_ATTENTION_FUNCTIONS[_EXACT_NAME] = original


def _any_flash_name() -> bool:
    """Whether this transformers asks for "flash" in the name, not for one exact name (4.57)."""
    import transformers.utils.generic as generic

    return hasattr(generic, "is_flash_attention_requested")
