"""`torch.nn.TransformerEncoder` makes nested tensors of a batch and its mask, which no graph can hold."""

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.towers import distance

LENGTHS = [6, 2, 3]
PADDING = torch.arange(6) >= torch.tensor(LENGTHS)[:, None]


def stack(**options):
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, **options).eval()


def encoder_of(module, real=False):
    spec = vg.BufferSpec("src", vg.Lengths(padded=True), [vg.buffers.Mask("src_key_padding_mask", real=real)])
    return vg.GraphedEncoder(module, [vg.budgets.Budget.padded(4, 16)], spec, backend="tape")


@pytest.mark.parametrize("real", [False, True])  # with the wrong one, padding items alone are left, and torch raises
@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_the_refusal_says_how_to_do_without(real):
    with pytest.raises(vg.errors.CaptureError, match=r"(?s)nested tensors.*transformer.py.*enable_nested_tensor=False"):
        encoder_of(stack(), real)(torch.randn(3, 6, 16), lengths=LENGTHS)


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_what_the_refusal_says_helps():
    module, rows = stack(), torch.randn(3, 6, 16)
    expected = module(rows, src_key_padding_mask=PADDING)
    module.use_nested_tensor = False
    encoder = encoder_of(module)
    assert distance(encoder(rows, lengths=LENGTHS)[~PADDING], expected[~PADDING]) < 1e-5
    assert (
        distance(encoder_of(stack(enable_nested_tensor=False))(rows, lengths=LENGTHS)[~PADDING], expected[~PADDING])
        < 1e-5
    )
    assert encoder.stats.replays.total() == 1


def test_a_failure_of_the_module_that_no_rule_explains_is_told_as_it_is():
    class Raises(nn.Linear):
        def forward(self, x):
            raise ZeroDivisionError("by the module")

    encoder = vg.GraphedEncoder(Raises(8, 8).eval(), [64], vg.BufferSpec("x", vg.Lengths()), backend="tape")
    with pytest.raises(ZeroDivisionError, match="by the module"):
        encoder(torch.randn(5, 8), lengths=[5])
    with pytest.raises(vg.errors.SpecError, match="the shape of x is not known"):
        encoder.capture()
