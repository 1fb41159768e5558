"""Which tensors are the host's, and which operators read device tensors on the host."""

from contextlib import nullcontext
from functools import lru_cache

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import Of
from varlen_graphs.capture.tape import TapeCapture


def arange_between_tensors(m, x, n):
    return x + torch.arange(n[0] * 0, n[0] * 0 + 4).to(x.device)


def full_of_a_tensor(m, x, n):
    return x + torch.full((4,), n[0]).to(x.device)


def moved_to_the_host(m, x, n):
    return x.to(torch.device("cpu"))


def moved_to_a_host_tensor(m, x, n):
    return x.to(torch.ones(3))


def made_on_the_device(m, x, n):
    return x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)


def made_empty_on_the_device(m, x, n):
    return torch.cat([torch.tensor([], device=x.device), x, x.new_tensor([])]) * 2


def cast_like_a_device_tensor(m, x, n):
    return x + torch.tensor(2).type_as(x)


def cast_like_a_host_tensor(m, x, n):
    return x.type_as(torch.ones(3))


def copied_to_the_device(m, x, n):
    return x + torch.as_tensor(torch.ones(4), device=x.device)


def made_where_a_host_tensor_is(m, x, n):
    host = torch.ones(3)
    return x * torch.tensor([1.0, 2.0, 3.0], device=host.device).add(host).sum()


def made_where_the_name_says(m, x, n):
    return x * torch.arange(3, device=torch.device("cpu")).tolist()[0]


def new_on_the_host(m, x, n):
    return x * torch.ones(3).new_tensor([2.0]).sum()


def moved_to_its_own_device(m, x, n):
    return x.to(m.own) + torch.zeros(4, device=m.own) + torch.zeros(4, device=x.device)


def reduced_by_lengths(m, x, n):
    return torch.segment_reduce(x, "sum", lengths=n)


def reduced_unsafely(m, x, n):
    return torch.segment_reduce(x, "sum", lengths=n, unsafe=True)


def histogram(m, x, n):
    return torch.histc(x, 4)


def histogram_between(m, x, n):
    return torch.histc(x, 4, min=0, max=8)


def sampled(m, x, n):
    return torch.multinomial(x, 1)


def one_hot(m, x, n):
    return nn.functional.one_hot(n, 9)


def one_hot_by_the_largest(m, x, n):
    return nn.functional.one_hot(n)


def quantile(m, x, n):
    return torch.quantile(x, x[:2] / 8)


@torch.library.custom_op("tests::longest", mutates_args=())
def longest(lengths: torch.Tensor) -> int:
    return int(lengths.max())


def an_operator_that_returns_a_number(m, x, n):
    return x[: longest(n)]


FINDS = {
    arange_between_tensors: ["host sync", "copy to device"], full_of_a_tensor: ["host sync", "copy to device"],
    moved_to_the_host: ["copy to host"], moved_to_a_host_tensor: ["copy to host"],
    made_on_the_device: ["copy to device"], copied_to_the_device: ["copy to device"],
    made_empty_on_the_device: [], cast_like_a_device_tensor: ["copy to device"],
    cast_like_a_host_tensor: ["copy to host"],
    made_where_a_host_tensor_is: [], made_where_the_name_says: [], new_on_the_host: [], moved_to_its_own_device: [],
    reduced_by_lengths: ["host sync"], reduced_unsafely: [], histogram: ["host sync"], histogram_between: [],
    sampled: ["host sync"], one_hot: [], one_hot_by_the_largest: ["host sync"], quantile: [],
    an_operator_that_returns_a_number: ["host sync"],
}  # fmt: skip


@pytest.mark.parametrize("function", FINDS)
def test_host_and_device_are_told_apart(function):
    module, example = Of(function), (torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1, 3]))
    module.own = torch.device("cpu")
    findings = vg.diagnose(module, example)
    assert [finding.kind for finding in findings if finding.blocks] == FINDS[function]
    with pytest.raises(vg.errors.CaptureError) if FINDS[function] else nullcontext():
        TapeCapture().capture(lambda: function(module, *example), "the test")


@lru_cache
def by_length(length, device):
    return torch.arange(length, device=device)


def test_a_cache_by_layout_is_one_finding():
    def forward(m, x, n):
        return x * by_length(m.lengths[len(n)], x.device).sum()

    by_length.cache_clear()
    module, x = Of(forward), torch.ones(8)
    module.lengths = {2: 5, 3: 4}
    (finding,) = vg.diagnose(module, *((x, torch.tensor(n)) for n in ([3, 5], [2, 6], [2, 2, 4])))
    assert (finding.kind, finding.line.function) == ("cache by layout", "by_length")


class Torch(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(x)


def test_every_finding_has_a_line():
    for module in (Torch(), nn.BatchNorm1d(4), nn.Sequential(nn.Dropout())):
        findings = vg.diagnose(module.train(), torch.ones(8, 4))
        assert len(findings)
        assert all(finding.line.number and finding.line.source for finding in findings)
        assert not any(finding.line.file == __file__ for finding in findings if type(module) is not Torch)
