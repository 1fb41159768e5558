"""`vg.wrap` on modules that are understood by their first call, on real CUDA graphs."""

import copy

import pytest
import torch

import varlen_graphs as vg
from tests.support.called_modules import DIM, Classifier, Model, Placed, Sequences, about, made, placed
from tests.support.gpu import on_gpus

pytestmark = on_gpus()


def wrapped(module, **options):
    module = module.to("cuda")
    own = copy.deepcopy(module)
    return vg.wrap(module, **options), own


def replays(model):
    return sum(
        one.stats.replays.total() for encoder in vg.encoders(model).values() for one in (encoder, *encoder.others)
    )


@torch.no_grad()
def test_batches_and_forms_replay():
    model, own = wrapped(made(Classifier))
    for count, side, more in ((2, 12, {}), (5, 12, {}), (3, 20, {}), (2, 12, {"scale": 0.5}), (1, 12, {"scale": 0.5})):
        images = torch.randn(count, 3, side, side, device="cuda")
        torch.testing.assert_close(model(images, **more), own(images, **more), rtol=1e-3, atol=1e-3)
    assert replays(model) == 5


@pytest.mark.parametrize("real", [True, False, None], ids=["mask", "padding mask", "lengths"])
@torch.no_grad()
def test_padded_batches_replay(real):
    model, own = wrapped(made(Sequences, real), padded=True)
    for lengths in ([20, 7, 13], [33], [5, 5], [40, 1]):
        call = torch.randn(len(lengths), max(lengths), DIM, device="cuda"), about(lengths, real).to("cuda")
        ours, expected = model(*call), own(*call)
        for item, length in enumerate(lengths):
            torch.testing.assert_close(ours[item, :length], expected[item, :length], rtol=1e-3, atol=1e-3)
    assert replays(model) == 4


@torch.no_grad()
def test_the_parts_that_are_called_get_encoders():
    model, own = wrapped(made(Model))
    images = torch.randn(3, 3, 12, 12, device="cuda")
    torch.testing.assert_close(model.encode_images(images), own.encode_images(images), rtol=1e-3, atol=1e-3)
    assert [*vg.encoders(model)] == ["images"]
    assert replays(model) == 1


@torch.no_grad()
def test_places_among_floats_end_no_process():
    model, own = wrapped(made(Placed))
    calls = [placed(batch).cuda() for batch in (3, 2, 3)]
    with pytest.warns(UserWarning, match="got indices from -1 to"):
        first = model(calls[0])
    assert torch.equal(first, own(calls[0]))
    assert all(torch.equal(model(call), own(call)) for call in calls)
    torch.cuda.synchronize()
    assert replays(model) == 0
