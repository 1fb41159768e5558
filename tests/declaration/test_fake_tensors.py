"""Tensors without values, in any argument: named, with what to call instead."""

import re

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import varlen_graphs as vg
from tests.support.encoders import SIMULATED


class Adds(nn.Module):
    def forward(self, x, beside, of_item, scale):
        return x + beside + of_item[0] * 0 + scale


SPEC = vg.BufferSpec(
    vg.inputs.Rows("x", (4,)),
    vg.Lengths("lengths", columns=(vg.layouts.Column("kind", default=0),)),
    inputs=[vg.inputs.PerRow("beside", (4,)), vg.inputs.PerItem("of_item", (4,)), vg.inputs.PerCall("scale", (4,))],
)
CALL = {
    "x": torch.ones(6, 4), "lengths": torch.tensor([4, 2]), "kind": torch.tensor([1, 2]), "beside": torch.ones(6, 4),
    "of_item": torch.ones(2, 4), "scale": torch.ones(4),
}  # fmt: skip


@pytest.mark.parametrize("options", [{"backend": "tape"}, {"backend": "eager"}, SIMULATED], ids=str)
@pytest.mark.parametrize("name", CALL)
def test_a_fake_tensor_in_any_argument_is_named(name, options):
    encoder = vg.GraphedEncoder(Adds().eval(), [64], SPEC, **options)
    expected = encoder(**CALL)
    message = f"{name} is a FakeTensor, which has a shape and no values: expected a tensor of values; trace the module"
    fakes = [FakeTensorMode().from_tensor(CALL[name])]
    fakes += [[*fakes[0].unbind()]] if name in ("lengths", "kind") else []
    for fake in fakes:
        with pytest.raises(vg.errors.InputError, match=re.escape(message)):
            encoder(**CALL | {name: fake})
    assert torch.equal(encoder(**CALL), expected)


def test_a_fake_mask_is_named():
    encoder = vg.GraphedEncoder(
        nn.Linear(4, 4).eval(), [vg.budgets.Budget.padded(2, 8)], vg.BufferSpec("input", vg.Mask("mask")), backend="tape",
        forward=lambda module, input: module(input),
    )  # fmt: skip
    mask = FakeTensorMode().from_tensor(torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(vg.errors.InputError, match="mask is a FakeTensor"):
        encoder(torch.ones(2, 3, 4), mask=mask)


def test_items_under_a_transform_of_functions_are_named():
    encoder = vg.GraphedEncoder(Adds().eval(), [64], SPEC, backend="tape")
    with pytest.raises(
        vg.errors.InputError, match=r"lengths has no memory of its own, as under a transform of torch\.func"
    ):
        torch.func.vmap(lambda lengths: encoder(**CALL | {"lengths": lengths}))(CALL["lengths"][None])
