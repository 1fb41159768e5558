"""Host tensors that a forward makes and copies to the GPU, on real CUDA graphs."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.gpu import on_gpus
from tests.support.host_constants import (
    CONSTANTS,
    KEPT,
    RANDOM,
    SPEC,
    VARYING,
    Towers,
    moved_range,
    pinned,
    relative_positions,
)
from tests.support.towers import distance

pytestmark = [*on_gpus(), pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")]


def encoder_of(function, **options):
    return vg.GraphedEncoder(Towers(function).eval().cuda(), [16, 32], SPEC, **options)


@pytest.mark.parametrize("function", [*CONSTANTS, pinned])
def test_a_graph_holds_what_the_forward_makes_on_the_host(function):
    encoder = encoder_of(function)
    for rows in (5, 20, 16, 5):
        x = torch.randn(rows, 8, device="cuda")
        expected = encoder.module(x)
        for _ in range(2):
            assert distance(encoder(x, lengths=[rows]), expected) < 1e-5
        encoder.poison()
    assert not encoder.stats.eager
    assert encoder.stats.replays.total() >= 8


def test_weights_may_change_in_place_after_the_capture():
    encoder = encoder_of(relative_positions)
    x = torch.randn(5, 8, device="cuda")
    before = encoder(x, lengths=[5])
    optimizer = torch.optim.SGD([encoder.module.table.requires_grad_()], lr=0.5)
    encoder.module.table.grad = torch.ones_like(encoder.module.table)
    optimizer.step()
    with torch.no_grad():
        assert distance(encoder(x, lengths=[5]), encoder.module(x)) < 1e-5
        encoder.module.load_state_dict({"table": torch.randn(9, 8)})
        after = encoder(x, lengths=[5])
        assert distance(after, encoder.module(x)) < 1e-5
    assert distance(after, before) > 1e-2
    assert not encoder.stats.eager


@pytest.mark.parametrize("function", VARYING)
def test_values_that_differ_from_run_to_run_are_refused(function):
    with pytest.raises(vg.errors.CaptureError, match=rf"differs from that of the run before\n.*in {function.__name__}"):
        encoder_of(function)(torch.randn(3, 8, device="cuda"), lengths=[3])
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.ones(2, device="cuda").sum().item() == 2


@pytest.mark.parametrize("function", [*KEPT, *RANDOM])
def test_what_may_change_on_the_host_is_refused(function):
    """So what the module keeps on the host is never stale."""
    with pytest.raises(vg.errors.CaptureError, match=rf"host tensor(.|\n)*in {function.__name__}"):
        encoder_of(function)(torch.randn(3, 8, device="cuda"), lengths=[3])


def test_a_buffer_that_stays_on_the_host_is_refused():
    module = Towers(lambda m, x: x * m.factors.to(x.device)).eval().cuda()
    module.register_buffer("factors", torch.ones(8))  # after the module was moved
    encoder = vg.GraphedEncoder(module, [16], SPEC)
    with pytest.raises(vg.errors.CaptureError, match="copies a host tensor to the device"):
        encoder(torch.randn(3, 8, device="cuda"), lengths=[3])


def test_a_replay_copies_nothing_from_the_host():
    encoder = encoder_of(moved_range)
    encoder(torch.randn(5, 8, device="cuda"), lengths=[5])
    (graphs,) = encoder.executor.store.sets
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        next(iter(graphs)).replay()
        torch.cuda.synchronize()
    assert not [event.name for event in profile.events() if "HtoD" in event.name]


def test_encoders_of_torch_with_a_fast_path_may_stand_beside_constants():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().cuda()

    def forward(m, x):
        return layer(x[:, None])[:, 0] * torch.linspace(0, 1, 8).to(x.device)

    encoder = encoder_of(forward)
    x = torch.randn(5, 8, device="cuda")
    with torch.no_grad():
        assert distance(encoder(x, lengths=[5]), encoder.module(x)) < 1e-5
    assert not encoder.stats.eager
