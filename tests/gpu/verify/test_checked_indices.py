"""Attention of runs on synthetic items: as cuDNN computes it, without its plans."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from tests.support.gpu import on_gpus
from varlen_graphs.torch_dispatch.checked_indices import CheckedIndices
from varlen_graphs.torch_dispatch.thread_modes import run_under

pytestmark = on_gpus()

CASES = {
    "plain": ({}, 4, 72, False),
    "causal, another scale": ({"is_causal": True, "scale": 0.3}, 4, 64, False),
    "views of one projection": ({}, 4, 80, True),
    "a mask": ({"attn_mask": torch.ones(40, 40, dtype=torch.bool).tril()}, 4, 64, False),
    "fewer heads of keys": ({"enable_gqa": True}, 2, 64, False),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_of_cudnn(name):
    options, heads_of_keys, channels, together = CASES[name]
    options = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    heads = (4, heads_of_keys, heads_of_keys)
    if together:
        rows = torch.randn(40, 3 * 4 * channels, device="cuda", dtype=torch.bfloat16)
        query, key, value = rows.view(1, 40, 3, 4, channels).permute(2, 0, 3, 1, 4).unbind(0)
    else:
        query, key, value = (
            torch.randn(1, count, 40, channels, device="cuda", dtype=torch.bfloat16) for count in heads
        )

    def run():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(query, key, value, **options)

    def launches(call):
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            output = call()
            torch.cuda.synchronize()
        return output, [event.name for event in seen.events() if "cudnn" in event.name.lower()]

    run()  # cuDNN plans
    expected, planned = launches(run)
    output, others = launches(lambda: run_under(run, CheckedIndices()))
    assert planned
    assert bool(others) == (name in ("a mask", "fewer heads of keys"))
    torch.testing.assert_close(output, expected, atol=2e-2, rtol=2e-2)
