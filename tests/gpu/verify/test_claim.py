"""`forward=` and `method=` on real CUDA graphs."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.encoders import rows_for
from tests.support.gpu import on_gpus
from tests.support.towers import distance
from tests.verify.test_claim import AddsPerItem, AddsPerRow, Classifier, answer, call, expected, right, wrong

pytestmark = on_gpus()

PER_ROW = vg.BufferSpec(
    vg.inputs.Rows("x", shape=(8,)), vg.Lengths("lengths"), inputs=[vg.inputs.PerItem("c", (8,), per_row=True)]
)
IMAGES = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Batch())


def on_gpu(arguments):
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


@pytest.mark.parametrize("module", [AddsPerItem, AddsPerRow])
def test_a_function_of_an_entry_a_row_is_held_to_the_module(module):
    encoder = vg.GraphedEncoder(module().cuda().eval(), [64], PER_ROW, forward=right, verify=3)
    out = encoder(**on_gpu(call()))
    lengths = torch.tensor(call()["lengths"], device="cuda")
    assert distance(out, expected(encoder.module, **on_gpu(call()) | {"lengths": lengths})) < 2e-3
    assert encoder.stats.replays.total() == 1
    assert "1 replay verified against the module itself, 0 wrong" in encoder.report()
    refused = vg.GraphedEncoder(module().cuda().eval(), [64], PER_ROW, forward=wrong)
    with pytest.raises(vg.errors.SpecError, match="computes something other than"):
        answer(refused, **on_gpu(call()))


def test_a_method_is_graphed():
    module = Classifier(3).cuda().eval()
    encoder = vg.GraphedEncoder(module, [16], IMAGES, method="forward_features")
    rows = rows_for([5]).cuda()
    assert distance(encoder(rows), module.forward_features(rows)) < 2e-3
    assert encoder.stats.replays.total() == 1
    other = vg.GraphedEncoder(module, [16], IMAGES, forward=lambda module, x: module.forward_features(x))
    with pytest.raises(vg.errors.SpecError, match="method='forward_features'"):
        answer(other, x=rows)
