"""Our attention inside unmodified transformers models."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from einops import rearrange
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from varlen_graphs.attention.api import varlen_attention
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
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`varlen_attention` with the signature of transformers' attention functions.

    Args:
        module: The attention module; it tells whether attention is causal where no argument does.
        query: `[1, heads, rows, head_dim]`.
        key: As `query`.
        value: As `query`.
        attention_mask: Must be `None`: segments say what attends to what.
        scaling: Factor on the scores.
        cu_seq_lens_q: int32 `[segments + 1]`.
        max_length_q: Rows of the longest segment. A tensor (transformers 4.57) is replaced by the number of rows, an
            upper bound that needs no host sync.
        sliding_window: As in transformers without a causal mask: a query sees `sliding_window - 1` keys to either side.
        is_causal: Must not be true.
        **kwargs: What else transformers passes. What would change the result is refused: causal attention, soft caps,
            sinks, dropout, keys of other lengths than the queries.

    Returns:
        `[1, rows, heads, head_dim]`, and no weights.

    Raises:
        InputError: A padded batch, a mask, or an option that would change the result.
    """
    unsupported = [name for name in ("softcap", "s_aux", "dropout") if _given(kwargs, name)]
    if is_causal or (is_causal is None and getattr(module, "is_causal", False)):
        unsupported.append("is_causal")
    if kwargs.get("cu_seq_lens_k", cu_seq_lens_q) is not cu_seq_lens_q:
        unsupported.append("cu_seq_lens_k")
    if query.shape[0] != 1 or cu_seq_lens_q is None or attention_mask is not None or unsupported:
        raise InputError(
            f"{ATTENTION} got query {list(query.shape)}, cu_seq_lens_q {cu_seq_lens_q is not None}, attention_mask "
            f"{attention_mask is not None} and {unsupported or 'nothing else'}: expected packed rows [1, heads, rows, "
            "head_dim] with cu_seq_lens_q, no mask and no other option; use it for encoders that pack their items"
        )
    q, k, v = (rearrange(x, "1 heads rows dim -> rows heads dim") for x in (query, key, value))
    longest = max_length_q if isinstance(max_length_q, int) else q.shape[0]
    window = (sliding_window - 1,) * 2 if sliding_window else (-1, -1)
    return varlen_attention(q, k, v, cu_seq_lens_q, longest, scale=scaling, window=window)[None], None


def _given(kwargs: dict[str, Any], name: str) -> bool:
    value = kwargs.get(name)
    return value is not None and (isinstance(value, Tensor) or bool(value))


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, flash_attention)


@contextmanager
def use_attention(module: Any) -> Iterator[None]:
    """Run a transformers model on `varlen_attention` inside a `with` block, unmodified.

    Sets the attention through the property of the config, because `set_attn_implementation` looks for an unknown name
    with "flash" in it on the hub. On transformers 4.57, which knows one name only, that name means our attention inside
    the block, for the whole process.

    Args:
        module: A tower, or a model all of whose parts pack their items: the attention of the others refuses to run.
    """
    config, original = module.config, ALL_ATTENTION_FUNCTIONS[_EXACT_NAME]
    before = [(part, part._attn_implementation) for part in _with_parts(config)]
    name = ATTENTION if _any_flash_name() else _EXACT_NAME
    try:
        ALL_ATTENTION_FUNCTIONS[name] = flash_attention
        config._attn_implementation = name
        yield
    finally:
        for part, implementation in before:  # outer ones first: their property sets that of their parts too
            part._attn_implementation = implementation
        ALL_ATTENTION_FUNCTIONS[_EXACT_NAME] = original


def _with_parts(config: Any) -> list[Any]:
    """A config and those inside it."""
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [config, *(part for one in inner if one is not None for part in _with_parts(one))]


def _any_flash_name() -> bool:
    """Whether this transformers asks for "flash" in the name, not for one exact name (4.57)."""
    import transformers.utils.generic as generic

    return hasattr(generic, "is_flash_attention_requested")
