"""Training with CUDA graphs in place: gradients are those of the tower without an encoder, and graphs follow weights."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.gpu import on_gpus
from tests.support.towers import distance, pixels, qwen3_vl_tower
from varlen_graphs.capture.mode import TRAINING

pytestmark = on_gpus()

GRID = [(1, 4, 6), (1, 2, 4)]


def loss_of(output):
    return output.last_hidden_state.square().mean() + output.pooler_output.square().mean()


def gradients(tower, output):
    tower.zero_grad()
    loss_of(output).backward()
    return {name: p.grad.clone() for name, p in tower.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("on_device", [False, True])
def test_steps_of_training_between_replays(on_device):
    tower, rows, grid = qwen3_vl_tower().cuda(), pixels(GRID).cuda(), torch.tensor(GRID, device="cuda")
    encoder = vg.recipes.qwen3_vl(tower, [vg.budgets.Budget(128, items=4, segments=4)])
    layout = grid if on_device else GRID
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.1)
    for _ in range(3):
        encoder.eval()
        assert distance(encoder(rows, grid_thw=layout), tower(rows, grid_thw=grid)) < 1e-3
        encoder.train()
        with torch.enable_grad():
            expected = gradients(tower, tower(rows, grid_thw=grid))
            found = gradients(tower, encoder(rows, grid_thw=layout))
        assert found.keys() == expected.keys()
        assert all(distance(found[name], expected[name]) < 1e-3 for name in expected)
        optimizer.step()
    assert encoder.stats.replays.total() == 3
    assert encoder.stats.eager == {TRAINING: 3}
