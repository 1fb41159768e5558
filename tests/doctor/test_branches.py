"""Loops and branches that the layout decides, each named where it stands."""

import torch
from torch import nn

import varlen_graphs as vg
from tests.doctor.layouts import TWO
from tests.support.encoders import Of


class First(nn.Module):
    def forward(self, x, lengths):
        x = x + 1
        if len(lengths) < 3:
            return x
        return x * 2


class Second(nn.Module):
    def forward(self, x, lengths):
        y = x - 1
        if len(lengths) < 3:
            return y
        return y / 2


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = First(), Second()

    def forward(self, x, lengths):
        return self.second(self.first(x, lengths), lengths)


def branches(module):
    return [f.line.source for f in vg.diagnose(module, *TWO) if f.kind == "frozen branch"]


def test_a_branch_in_the_forward_of_one_class_hides_none_in_another():
    found = [f.line.number for f in vg.diagnose(Both(), *TWO) if f.kind == "frozen branch"]
    assert found == [cls.forward.__code__.co_firstlineno + 2 for cls in (First, Second)]


def test_a_comprehension_in_an_assignment_is_named():
    def forward(m, x, lengths):
        x = x * 2
        parts = [part + 1 for part in range(len(lengths)) for part in [x[0]]]
        y = torch.cat([x[:1] + part for part in parts])
        z = torch.cat([x[:1] - at for at in range(len(lengths))])
        return x, y, z

    assert [source.split(" =")[0] for source in branches(Of(forward))] == ["parts", "y", "z"]


def test_a_conditional_expression_in_an_assignment_is_named():
    def forward(m, x, lengths):
        y = x * (x.relu() if len(lengths) > 2 else 1) + 1
        return y - 1

    assert branches(Of(forward)) == ["y = x * (x.relu() if len(lengths) > 2 else 1) + 1"]


def test_a_loop_after_a_branch_that_does_not_return_is_named():
    def forward(m, x, lengths):
        x = x.relu() if len(lengths) > 2 else x.sigmoid() + 1
        for at in range(len(lengths)):
            x = x * at
        return x

    assert [source.partition(" ")[0] for source in branches(Of(forward))] == ["x", "for"]


def test_a_loop_over_the_entries_of_a_tensor_follows_its_size():
    def forward(m, x, lengths):
        for length in lengths[:]:
            x = torch.where(x > 2, length, x)
        return x

    proof, finding = vg.diagnose(Of(forward), *TWO)
    assert proof.kind == "wrong replay"  # items act on each other
    assert (finding.kind, finding.blocks, finding.line.source) == ("padded size", False, "for length in lengths[:]:")


def test_a_branch_in_a_loop_is_named_if_it_does_not_follow_the_loop():
    def forward(m, x, lengths):
        for at in range(len(lengths)):
            x = x * 2
            if m.odd[len(lengths)] == at:
                x = x + 1
            if x.dim() == 2:
                x = x - 1
        return x

    module = Of(forward)
    module.odd = {2: 1, 3: 5}
    assert branches(module) == ["for at in range(len(lengths)):", "if m.odd[len(lengths)] == at:"]


def cut(x, at, most):
    x = x * 3
    if at < most:
        x = x.relu()
    return x


def test_a_branch_in_what_a_loop_calls_is_named_if_it_does_not_follow_the_loop():
    def forward(m, x, lengths):
        for at in range(len(lengths)):
            x = cut(x, at, m.most[len(lengths)])
        return x

    module = Of(forward)
    module.most = {2: 2, 3: 1}
    assert branches(module) == ["for at in range(len(lengths)):", "if at < most:"]


def test_a_loop_after_an_early_return_is_not():
    def forward(m, x, lengths):
        x = x * 2
        if len(lengths) < 3:
            return x
        x = x + 1
        for length in lengths.unbind():
            x = x * length
        return x

    assert branches(Of(forward)) == ["if len(lengths) < 3:"]


def test_a_comprehension_around_a_function_decides_nothing_inside_of_it():
    def forward(m, x, lengths):
        steps = [lambda x: x + 1 for _ in range(2)]
        return [step(x) for step in steps]

    assert not branches(Of(forward))


def test_a_loop_is_named_though_an_operation_of_its_lines_runs_in_one_turn_only():
    def forward(m, x, lengths):
        start, parts = 0, []
        for at in range(len(lengths)):
            number = x[at].sum()
            parts.append(x[at] * (start + number))  # the first sum is of a number and a tensor
            start += number
        return torch.stack(parts)

    assert branches(Of(forward)) == ["for at in range(len(lengths)):"]
