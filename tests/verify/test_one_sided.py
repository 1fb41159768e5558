"""What a module asks of all rows is another answer beside padding of zeros: found at the capture, before such rows come."""

import pytest
import torch
from torch import nn

import varlen_graphs as vg

REFUSED = "its budget failed verification"
FLAGS, NUMBERS = vg.inputs.PerItem("given", (1,), dtype=torch.bool), vg.inputs.PerRow("given", (1,))
INTEGERS = vg.inputs.PerItem("given", (1,), dtype=torch.int64)


class Asks(nn.Module):
    """A linear layer that adds what a question to all rows says."""

    def __init__(self, question):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.question = nn.Linear(8, 8), question

    def forward(self, x):
        return self.linear(x) + self.question(x)


class AsksBeside(Asks):
    """The same, of a tensor beside the rows."""

    def forward(self, x, given):
        return self.linear(x) + self.question(given)


ROWS = {
    "the largest is negative": lambda x: x.amax() < 0,
    "the smallest is large": lambda x: torch.where(x.amin() > 1, x.amin(), 0),
    "none is zero": lambda x: x.abs().amin() < 1e-7,
    "all are negative": lambda x: (x < 0).all(),
    "all are positive": lambda x: (x > 0.5).all(),
}
BESIDE = {
    "rows beside": (NUMBERS, lambda t: (t < 0).all(), -torch.rand(30, 1) - 0.1),
    "flags": (FLAGS, torch.all, torch.ones(2, 1, dtype=torch.bool)),
    "integers": (INTEGERS, lambda t: (t > 0).all(), torch.tensor([[5], [3]])),
}


def rows_of_all_signs():
    return [torch.randn(30, 8), -torch.rand(30, 8) - 0.1, torch.rand(30, 8) + 2]


@pytest.mark.parametrize("question", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("ahead", [False, True])
def test_questions_to_all_rows_are_found(question, ahead):
    module = Asks(question).eval()
    spec = vg.BufferSpec(vg.inputs.Rows("x", (8,)), vg.Lengths("lengths"))
    encoder = vg.GraphedEncoder(module, [64, 128], spec, backend="tape")
    with torch.no_grad(), pytest.warns(UserWarning, match="failed verification"):
        encoder.capture() if ahead else encoder(torch.randn(6, 8), lengths=[6])
    with torch.no_grad():
        for rows in rows_of_all_signs():
            torch.testing.assert_close(encoder(rows, lengths=[20, 10]), module(rows))
    assert encoder.stats.eager.keys() == {REFUSED}


@pytest.mark.parametrize(("given", "question", "values"), BESIDE.values(), ids=BESIDE.keys())
def test_questions_to_all_that_lies_beside_the_rows_are_found(given, question, values):
    module, rows = AsksBeside(question).eval(), torch.randn(30, 8)
    spec = vg.BufferSpec("x", vg.Lengths("lengths"), inputs=[given])
    encoder = vg.GraphedEncoder(module, [64], spec, backend="tape")
    with torch.no_grad(), pytest.warns(UserWarning, match="failed verification"):
        encoder(rows, lengths=[20, 10], given=torch.zeros_like(values))
    with torch.no_grad():
        torch.testing.assert_close(encoder(rows, lengths=[20, 10], given=values), module(rows, values))


@pytest.mark.parametrize("budgets", [[4], [2], [1, 4], [3]])
@pytest.mark.parametrize("question", [ROWS["all are positive"], ROWS["all are negative"]])
def test_questions_to_a_whole_batch_are_found(budgets, question):
    module = Asks(question).eval()
    encoder = vg.GraphedEncoder(module, budgets, vg.BufferSpec(vg.inputs.Rows("x", (8,)), vg.Batch()), backend="tape")
    with torch.no_grad(), pytest.warns(UserWarning, match="failed verification"):
        encoder.capture()
    with torch.no_grad():
        for batch in (torch.rand(3, 8) + 1.5, -torch.rand(3, 8) - 0.1, -torch.rand(7, 8) - 0.1):
            torch.testing.assert_close(encoder(batch), module(batch))


@pytest.mark.parametrize("budgets", [[8, 16], [12, 64], [1, 64], [24]])
@pytest.mark.parametrize("question", ROWS.values(), ids=ROWS.keys())
def test_questions_to_few_rows_are_found(budgets, question):
    module, sizes = Asks(question).eval(), [vg.budgets.Budget(rows) for rows in budgets]
    spec = vg.BufferSpec(vg.inputs.Rows("x", (8,)), vg.Lengths("lengths"))
    encoder = vg.GraphedEncoder(module, sizes, spec, backend="tape")
    with torch.no_grad(), pytest.warns(UserWarning, match="failed verification"):
        encoder.capture()
    with torch.no_grad():
        for rows in rows_of_all_signs():
            torch.testing.assert_close(encoder(rows[:7], lengths=[4, 3]), module(rows[:7]))


def test_a_module_that_takes_positive_rows_alone_is_graphed():
    module = nn.Sequential(nn.Linear(8, 8)).eval()
    module.forward = lambda x: module[0](x.log())
    encoder = vg.GraphedEncoder(module, [64, 128], vg.BufferSpec("x", vg.Lengths("lengths")), backend="tape")
    with torch.no_grad():
        for seed in range(3):
            rows = torch.rand(30, 8, generator=torch.Generator().manual_seed(seed)) + 1
            torch.testing.assert_close(encoder(rows, lengths=[20, 10]), module(rows))
    assert not encoder.stats.eager
