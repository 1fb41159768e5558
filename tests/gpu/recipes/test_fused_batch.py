"""`by_batch` on SigLIP, CLIP and Whisper on real CUDA graphs."""

import pytest
import torch

from tests.support.contract import check_half_precision
from tests.support.fused_towers import TOWERS, batch, encoder_of, tower_of
from tests.support.gpu import on_gpus

pytestmark = on_gpus()

COUNTS = (1, 2, 3, 6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TOWERS)
def test_half_precision_is_about_as_exact_as_the_tower(name, dtype):
    exact, tower = tower_of(name).cuda(), tower_of(name, dtype).cuda()
    encoder, outs = encoder_of(tower, backend="cuda"), []
    for count in COUNTS:
        x = batch(name, count, count, dtype).cuda()
        with torch.no_grad():
            outs.append(
                [
                    run(x.to(own)).last_hidden_state.flatten(0, 1)
                    for run, own in ((encoder, dtype), (tower, dtype), (exact, torch.float32))
                ]
            )
    check_half_precision(*map(torch.cat, zip(*outs, strict=True)), dtype)
    assert not encoder.stats.eager


@pytest.mark.parametrize("name", TOWERS)
def test_hidden_states_are_those_of_the_tower(name):
    encoder, tower = encoder_of(tower_of(name).cuda(), backend="cuda"), tower_of(name).cuda()
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for _ in range(2):
            x = batch(name, 3).cuda()
            out, expected = encoder(x, output_hidden_states=True), tower(x, output_hidden_states=True)
            torch.testing.assert_close(out.hidden_states, expected.hidden_states, rtol=1e-3, atol=1e-3)
    assert not encoder.stats.eager
