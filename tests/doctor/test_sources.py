"""Dataflow that the layout chooses: which tensor, in which order, which output, in which precision."""

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.doctor.layouts import TWO, layouts
from tests.support.encoders import Of


def operand_order(m, x, lengths):
    a, b = x.sin(), x.cos()
    if len(lengths) > 2:
        a, b = b, a
    return a - b


def cat_order(m, x, lengths):
    parts = [x.sin(), x.cos()]
    return torch.cat(parts if len(lengths) > 2 else parts[::-1])


def chunk_order(m, x, lengths):
    q, k = x.chunk(2, 1)
    q, k = (k, q) if len(lengths) > 2 else (q, k)
    return q @ k.T


def which_output(m, x, lengths):
    a, b = x.sin(), x.cos()
    return a if len(lengths) > 2 else b


def which_argument(m, x, lengths, y):
    return (x if len(lengths) > 2 else y) * 2


def which_precision(m, x, lengths):
    return x.to(torch.float16 if len(lengths) > 2 else torch.bfloat16).float()


CHOOSES = {
    operand_order: "self of aten.sub.Tensor is result 0 of aten.sin.default at line",
    cat_order: "tensors[0] of aten.cat.default is result 0 of aten.cos.default at line",
    chunk_order: "result 1 of aten.split.Tensor at line",
    which_output: "the output is result 0 of aten.cos.default at line",
    which_argument: "self of aten.mul.Tensor is the argument y in call 1, the argument x in call 2",
    which_precision: "dtype of aten._to_copy.default is torch.bfloat16 in call 1, torch.float16 in call 2",
}


@pytest.mark.parametrize("function", CHOOSES)
def test_what_the_layout_chooses_is_named(function):
    examples = TWO
    if function is which_argument:
        examples = [own | {"y": torch.ones(8, 4)} for own in examples]
    findings = [f for f in vg.diagnose(Of(function), *examples) if f.kind == "frozen value"]
    assert findings
    assert any(CHOOSES[function] in finding.what for finding in findings)
    assert all(finding.line.function in (function.__name__, "forward") for finding in findings)


class Layers(nn.Module):
    """Loops, residuals, views that lie on each other, operations in place, and a buffer cut to size."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("table", torch.randn(16, 4))

    def forward(self, x, lengths):
        x = x + self.table[: len(x)]
        states = []
        for at, layer in enumerate(self.layers):
            x = layer(x).relu_() + x[: len(x)]
            states.append(x.view(-1, 4))
            if at == 1:
                x += states[0]
        return torch.stack(states), x, lengths


def test_dataflow_that_is_the_same_in_all_calls_is_not():
    assert not list(vg.diagnose(Layers(), *layouts([3, 5], [2, 2, 4], [8], [16], [9, 7])))


def test_what_a_branch_makes_is_named_as_the_branch_alone():
    def forward(m, x, lengths):
        if len(lengths) > 2:
            x = x.sin()
        return x * 2

    (finding,) = vg.diagnose(Of(forward), *TWO)
    assert finding.kind == "frozen branch"
