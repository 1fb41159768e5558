"""What is watched runs as it runs unwatched: torch's fast paths, which a function mode switches off."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import varlen_graphs as vg
from varlen_graphs.capture.tape import TapeCapture

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")

PADDING = torch.tensor([[False] * 4, [False, False, True, True]])


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


class Tower(nn.Module):
    """Names a line of its own around torch's encoder."""

    def __init__(self):
        super().__init__()
        self.encoder = encoder()

    def forward(self, x, padding):
        return self.encoder(x, src_key_padding_mask=padding) * torch.ones(2).sum().item()


def test_the_doctor_and_the_tape_see_the_fast_path_of_a_transformer_encoder():
    tower, x = Tower(), torch.randn(2, 4, 8)
    sync, nested = vg.diagnose(tower, (x, PADDING))
    assert (sync.kind, nested.kind) == ("nested batch", "sparse tensor")
    for finding in (sync, nested):
        assert finding.line.source.startswith("return self.encoder(x, src_key_padding_mask=padding)")
    with pytest.raises(
        vg.errors.CaptureError, match=r"nested tensors of a batch.*\n.*(?s:.*)enable_nested_tensor=False"
    ):
        TapeCapture().capture(lambda: [tower(x, PADDING)], "the test")


@pytest.mark.parametrize("part", [encoder, lambda: encoder().layers[0], lambda: encoder().layers[0].self_attn])
def test_a_tape_records_the_operators_that_run_unwatched(part):
    module, x = part(), torch.randn(2, 4, 8)
    arguments = (x, x, x) if isinstance(module, nn.MultiheadAttention) else (x,)

    def run():
        output = module(*arguments)
        return [output[0] if isinstance(output, tuple) else output]

    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as plain:
        expected = run()
    tape = TapeCapture().capture(run, "the test")
    recorded = {str(operation.function).removesuffix(".default") for operation in tape.operations}
    ran = {event.name.replace("::", ".") for event in plain.events()}
    assert recorded <= ran
    assert any("_fwd" in name or "_native_multi_head_attention" in name for name in recorded)
    tape.replay()
    torch.testing.assert_close(tape.outputs[0], expected[0])  # the fast path does not repeat its bits on every CPU
    assert vg.diagnose(module, arguments).ok


def test_what_the_module_does_around_a_fast_path_is_still_refused():
    tower, x = Tower(), torch.randn(2, 4, 8)

    def run():
        return [tower.encoder(x) * float(x.sum())]

    with pytest.raises(vg.errors.CaptureError, match=r"Tensor\.__float__ reads a tensor on the host"):
        TapeCapture().capture(run, "the test")
