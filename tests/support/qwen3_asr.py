"""A small audio tower of Qwen3-ASR with random weights, and batches of clips."""

import pytest
import torch

from benchmarks.generic import enlarge

BINS, CHUNK = 16, 100


def asr_tower(dtype=torch.float32):
    modeling = pytest.importorskip("transformers.models.qwen3_asr.modeling_qwen3_asr")
    configuration = pytest.importorskip("transformers.models.qwen3_asr.configuration_qwen3_asr")
    config = configuration.Qwen3ASREncoderConfig(
        num_mel_bins=BINS, encoder_layers=3, encoder_attention_heads=4, encoder_ffn_dim=64, d_model=32,
        downsample_hidden_size=8, n_window_infer=200,
    )  # fmt: skip
    torch.manual_seed(0)
    tower = modeling.Qwen3ASREncoder._from_config(config, dtype=dtype)
    enlarge(tower)
    return tower.eval()


def clips(lengths, seed=0, device="cpu", dtype=torch.float32, more=0):
    """Return a batch padded to whole chunks, with values past the end of each clip, and its mask."""
    padded = (-(-max(lengths) // CHUNK) + more) * CHUNK
    x = torch.randn(len(lengths), BINS, padded, generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(padded) < torch.tensor(lengths)[:, None]).long()
    return x.to(device, dtype), mask.to(device)
