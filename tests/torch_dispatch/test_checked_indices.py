"""`CheckedIndices`: indices out of range are found on the host, ahead of the operator that would use them. For attention: tests/gpu."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from varlen_graphs.torch_dispatch.checked_indices import CheckedIndices
from varlen_graphs.torch_dispatch.thread_modes import run_under

ROWS = 5
X = torch.arange(15.0).view(ROWS, 3)
ONE = torch.ones(2, 3)

READS = {
    "index": lambda at: X[at],
    "index of the second dimension": lambda at: X.mT[:, at],
    "index after a mask": lambda at: X.expand(2, ROWS, 3)[torch.tensor([True, True]), at],
    "index_put": lambda at: X.clone().index_put((at,), ONE),
    "assignment": lambda at: X.clone().__setitem__(at, ONE),
    "index_select": lambda at: X.index_select(0, at),
    "index_add": lambda at: X.index_add(0, at, ONE),
    "index_copy": lambda at: X.index_copy(0, at, ONE),
    "index_fill": lambda at: X.index_fill(0, at, 1.0),
    "gather": lambda at: X.gather(0, at[:, None]),
    "scatter": lambda at: X.scatter(0, at[:, None], ONE[:, :1]),
    "scatter_add": lambda at: X.scatter_add(0, at[:, None], ONE[:, :1]),
    "embedding": lambda at: F.embedding(at, X),
    "take": lambda at: X[:, 0].contiguous().take(at),
}


def run(read, at):
    return run_under(lambda: read(torch.tensor(at)), CheckedIndices())


@pytest.mark.parametrize("name", READS)
def test_an_index_out_of_range_is_named_with_the_range(name):
    expected = READS[name](torch.tensor([0, ROWS - 1]))
    assert expected is None or torch.equal(run(READS[name], [0, ROWS - 1]), expected)
    with pytest.raises(IndexError, match=rf"got indices from 1 to {ROWS}, for a dimension of size {ROWS}"):
        run(READS[name], [1, ROWS])


@pytest.mark.parametrize("name", ["index", "index_put", "take"])
def test_negative_indices_count_from_the_end_where_the_operator_lets_them(name):
    assert torch.equal(run(READS[name], [-ROWS, 0]), READS[name](torch.tensor([-ROWS, 0])))
    with pytest.raises(IndexError, match=f"got indices from {-ROWS - 1} to 0"):
        run(READS[name], [-ROWS - 1, 0])


def test_other_operators_and_scalars_pass():
    assert torch.equal(run(lambda at: torch.tensor(3).index_select(0, at[:1]), [0, 9]), torch.tensor(3))
    assert torch.equal(run(lambda at: X[at > 1], [0, 9, 0, 9, 9]), X[[1, 3, 4]])
    assert torch.equal(run(lambda at: at + at, [9, 9]), torch.tensor([18, 18]))


def test_higher_order_operators_run():
    q, k, v = torch.randn(3, 1, 2, 8, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    with warnings.catch_warnings():  # torch warns of flex_attention without its compiler
        warnings.simplefilter("ignore")
        output = run_under(lambda: flex_attention(q, k, v), CheckedIndices())
    torch.testing.assert_close(output, torch.nn.functional.scaled_dot_product_attention(q, k, v))
