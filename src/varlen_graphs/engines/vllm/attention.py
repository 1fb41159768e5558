"""`varlen_attention` as the attention of vLLM's encoders."""

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from varlen_graphs.attention.api import varlen_attention
from varlen_graphs.engines.vllm.settings import read_settings

LARGEST_HEAD = 256
"""Largest `head_dim` of the kernel."""


class VarlenAttention(MMEncoderAttention):
    """Attention of vLLM's encoders, by `varlen_attention` in engines that ask for it.

    Once it is registered, vLLM makes one wherever an encoder has an `MMEncoderAttention`. In other engines of the
    process, and with attention in FP8, with FlashInfer, whose boundaries are laid out for its kernel alone, or with
    larger heads, it is what it replaces.

    Attributes:
        why_not: Why vLLM's own attention runs; `None` if `varlen_attention` does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.why_not = self._why_not()

    def _why_not(self) -> str | None:
        settings = read_settings(get_current_vllm_config_or_none())
        if settings is None or not settings.attention:
            return "it is not asked for"
        if self.fp8_enabled:
            return "its attention is in FP8; try mm_encoder_attn_dtype=auto"
        if self.attn_backend == AttentionBackendEnum.FLASHINFER:
            return "its attention is FlashInfer's; try --mm-encoder-attn-backend FLASH_ATTN"
        if self.head_size > LARGEST_HEAD:
            return f"its heads have {self.head_size} channels, more than {LARGEST_HEAD}"
        return None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Tensor | int | None = None,
        sequence_lengths: Tensor | None = None,
    ) -> Tensor:
        """Attend within the segments of `cu_seqlens`, or within each item of the batch.

        Takes and returns `[batch, rows, heads, head_dim]` or `[batch, rows, heads * head_dim]`; `cu_seqlens` counts the
        rows of the whole batch.
        """
        if self.why_not is not None:
            out: Tensor = super().forward(query, key, value, cu_seqlens, max_seqlen, sequence_lengths)
            return out
        q = query.reshape(-1, self.num_heads, self.head_size)
        k, v = (x.reshape(-1, self.num_kv_heads, self.head_size) for x in (key, value))
        if cu_seqlens is None:
            batch, rows, keys = query.shape[0], query.shape[1], key.shape[1]
            starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
            out = varlen_attention(
                q, k, v, starts * rows, rows, cu_seqlens_k=starts * keys, max_seqlen_k=keys, scale=self.scale
            )
        else:
            out = varlen_attention(q, k, v, cu_seqlens, _longest(max_seqlen, q.shape[0]), scale=self.scale)
        return out.reshape(query.shape)


def _longest(max_seqlen: Tensor | int | None, rows: int) -> int:
    """Return an upper bound of segment lengths that needs no sync: some backends of vLLM have 0 or `None`."""
    if isinstance(max_seqlen, Tensor):
        max_seqlen = int(max_seqlen) if max_seqlen.device.type == "cpu" else None
    return max_seqlen or rows
