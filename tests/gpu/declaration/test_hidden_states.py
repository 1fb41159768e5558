"""Hidden states as declared outputs, on real CUDA graphs."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.batches import images
from tests.support.contract import check_padding_contract
from tests.support.encoders import rows_for
from tests.support.gpu import on_gpus
from tests.support.hidden_states import (
    Layers,
    bert,
    bert_encoder,
    layers_encoder,
    original_layers,
    real_rows,
    texts,
    tower_encoder,
    tower_of,
)
from tests.support.towers import distance, equal_bits

pytestmark = on_gpus()

ASKS = {"output_hidden_states": True}


def rows_on_gpu(lengths, seed=0):
    return rows_for(lengths, seed, device="cuda")


@pytest.mark.parametrize("compile", [False, True])
def test_the_padding_contract_holds_for_all_layers(compile):
    module = Layers().cuda()
    encoder = layers_encoder(module, backend="cuda", capture=vg.options.Capture(compile=compile))
    layouts = [[128], [1], [30, 2, 40], [5, 5]]
    asking = original_layers(module, **ASKS)
    check_padding_contract(encoder, asking, rows_on_gpu, "lengths", layouts, 1e-3, lambda layout: ASKS)
    check_padding_contract(encoder, original_layers(module), rows_on_gpu, "lengths", layouts, 1e-3)
    assert len(encoder.executor.store.sets) == 2


@pytest.mark.parametrize("family", ["CLIPVision", "ViT"])
def test_a_caller_like_llava_selects_a_layer(family):
    tower = tower_of(family, "cuda")
    encoder = tower_encoder(tower, backend="cuda", verify=vg.options.Verify(strict=True))
    for seed, count in enumerate((7, 1, 3, 8, 2, 20)):
        x = images(count, 16, seed, "cuda")
        output = encoder(x, **ASKS)
        encoder.poison()
        assert equal_bits(encoder(x, **ASKS), output)
        assert distance(output, tower(x, **ASKS)) < 1e-3
        assert distance(output.hidden_states[-2], tower(x, **ASKS).hidden_states[-2]) < 1e-3
        assert distance(encoder(x), tower(x)) < 1e-3
    assert not encoder.stats.eager


def test_a_padded_text_encoder_returns_the_layers_of_real_rows():
    model, forward = bert("cuda")
    encoder = bert_encoder(model, forward, backend="cuda").capture(**ASKS)
    for lengths in ([64, 64, 64, 64], [1], [17, 60, 5], [33, 2]):
        ids, mask = texts(lengths, "cuda")
        encoder.poison()
        output = encoder(ids, attention_mask=mask, **ASKS)
        with torch.no_grad():
            expected = real_rows(model(ids, mask[:, None, None].bool(), **ASKS), mask)
        assert distance(dict(output), expected) < 1e-3
    assert not encoder.stats.eager
