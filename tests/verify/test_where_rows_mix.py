"""Refusals name the operation through which padding or other items reach an item, and the line that somebody wrote."""

import importlib.util
import sys

import pytest
import torch
from torch import nn

import varlen_graphs as vg

DIM, LONGEST = 8, 64
ROWS = vg.inputs.Rows("x", (DIM,))


def refusal(module, layout, budget):
    """Return the error of an encoder whose graphs are proven wrong."""
    torch.manual_seed(0)
    module = module().eval().requires_grad_(False)
    encoder = vg.GraphedEncoder(
        module, [budget], vg.BufferSpec(ROWS, layout), backend="tape", verify=vg.options.Verify(strict=True)
    )
    with pytest.raises(vg.errors.VerificationError) as error:
        encoder.capture()
    return str(error.value)


class Block(nn.Module):
    """A block of a Conformer: its attention leaves padding out, its convolution does not."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM)
        self.conv, self.out = nn.Conv1d(DIM, DIM, 3, padding=1), nn.Linear(DIM, DIM)

    def forward(self, x, padding, positions):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.mT + shifted(q @ positions.mT)
        weights = scores.masked_fill(padding[:, None], -1e9).softmax(-1)
        x = x + weights @ v.masked_fill(padding[..., None], 0)
        return x + self.out(self.conv(x.mT).mT)


def shifted(scores):
    """Return scores for distances, `[batch, length, 2 * length - 1]`, as those for keys."""
    batch, length, distances = scores.shape
    scores = nn.functional.pad(scores, (1, 0)).view(batch, distances + 1, length)[:, 1:]
    return scores.reshape(batch, length, distances)[..., :length]


class Conformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.distances = nn.Embedding(2 * LONGEST, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x, lengths):
        length = x.shape[1]
        padding = torch.arange(length, device=x.device) >= lengths[:, None]
        distances = torch.arange(length - 1, -length, -1, device=x.device) + LONGEST
        both = torch.empty(2, len(distances), DIM, device=x.device)
        both[0] = self.distances(distances)  # other ones come first in a longer batch
        positions = both[0]
        for block in self.blocks:
            x = block(x, padding, positions)
        return x


def test_a_convolution_over_padding_is_named_not_what_is_flattened_or_as_long_as_the_batch():
    message = refusal(Conformer, vg.Lengths(padded=True), vg.budgets.Budget.padded(4, 32))
    assert "is aten.convolution.default" in message
    assert "return x + self.out(self.conv(x.mT).mT)" in message
    assert "in blocks.0.conv (Conv1d)" in message


class Unmasked(Block):
    def forward(self, x, padding, positions):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.mT
        weights = scores.softmax(-1)
        return x + self.out(weights @ v)


class AttendsToPadding(Conformer):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Unmasked()])


def test_attention_to_padding_of_a_batch_is_named():
    message = refusal(AttendsToPadding, vg.Lengths(padded=True), vg.budgets.Budget.padded(4, 32))
    assert "weights = scores.softmax(-1)" in message


class Running(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x):
        x = self.linear(x)
        return x + x.cumsum(0)


def test_what_lets_items_act_on_each_other_is_named():
    """No replay is wrong: the items of a call have what the module itself makes of them, together."""
    message = refusal(Running, vg.Lengths(), vg.budgets.Budget(64, items=4))
    assert "The items of a call act on each other" in message
    assert "reach item 1 is aten.cumsum.default" in message
    assert "return x + x.cumsum(0)" in message


LIBRARY = """
def generate(body):
    scope = {}
    exec("def run(x):\\n    return " + body, scope)
    return scope["run"]

def call(body, x):
    return generate(body)(x)
"""


@pytest.fixture
def library(tmp_path):
    """Return a library that generates the code it runs."""
    path = tmp_path / "generates_code.py"
    path.write_text(LIBRARY)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]


def generated(library, body):
    class Generated(Running):
        def forward(self, x):
            x = self.linear(x)
            return x + library.call(body, x)

    return Generated


def test_generated_code_is_not_named_but_the_line_that_calls_its_library(library):
    line = "in forward: return x + library.call(body, x)"
    assert line in refusal(generated(library, "x - x.mean(0)"), vg.Lengths(), vg.budgets.Budget(64, items=4))
    for body in ("x * x.sum().item()", "x[x[:, 0] > 0]"):
        encoder = vg.GraphedEncoder(generated(library, body)(), [64], vg.BufferSpec(ROWS, vg.Lengths()), backend="tape")
        with pytest.raises(vg.errors.CaptureError) as error:
            encoder.capture()
        assert line in str(error.value)
    module = generated(library, "x * x.sum().item()")().eval()
    (finding, *_) = vg.diagnose(module, {"x": torch.randn(4, DIM)})
    assert finding.line.source == "return x + library.call(body, x)"


def test_errors_of_generated_code_are_put_to_the_line_that_calls_its_library(library):
    module = generated(library, "x.no_such_thing()")().eval()
    (finding, *_) = vg.diagnose(module, {"x": torch.randn(4, DIM)})
    assert finding.kind == "error"
    assert finding.line.source == "return x + library.call(body, x)"
