"""The doctor: everything that stands in the way of a graph, at once and by line."""

import json
import random
import re
import sys
import textwrap
import types
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.doctor.layouts import layouts
from tests.support.encoders import Of
from varlen_graphs.__main__ import main
from varlen_graphs.capture.tape import TapeCapture


def found(function, *calls):
    """What the doctor finds in a function: kinds and the names of functions, in order."""
    return [(finding.kind, finding.line.function) for finding in vg.diagnose(Of(function), *calls)]


def item(m, x, n):
    return x * n[0].item()


def tolist(m, x, n):
    return x.split(n.tolist())


def to_int(m, x, n):
    return x * int(n[0])


def index(m, x, n):
    return x[: n[0]]


def sized_by_a_tensor(m, x, n):
    return torch.arange(n[0], device=x.device)


def printed(m, x, n):
    return f"{x}"


def branch(m, x, n):
    return x if n.sum() > 2 else -x


def compared(m, x, n):
    return x if torch.equal(x, x) else -x


def contained(m, x, n):
    return x if 1 in n else -x


def cpu(m, x, n):
    return x.cpu()


def to_cpu(m, x, n):
    return x.to("cpu")


def numpy(m, x, n):
    return x.numpy()


def new_tensor(m, x, n):
    return x * x.new_tensor([2.0])


def made_on_the_device(m, x, n):
    return x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)


def moved(m, x, n):
    return x + torch.ones(4).to(x.device)


def host_tensor(m, x, n):
    return x + torch.ones(4)


def host_indices(m, x, n):
    return x[torch.tensor([0, 1])]


def nonzero(m, x, n):
    return x.nonzero()


def unique(m, x, n):
    return x.unique()


def boolean_index(m, x, n):
    return x[x > 0]


def repeated(m, x, n):
    return torch.repeat_interleave(x[:2], n)


def own_generator(m, x, n):
    return x + torch.rand(4, device=x.device, generator=torch.Generator())


def write_count(m, x, n):
    return x * (n._version + 1)


def range_to_a_tensor(m, x, n):
    return torch.linspace(0, n.max(), 8, device=x.device)


def range_of_logarithms(m, x, n):
    return torch.logspace(n.min(), n.max(), 8, device=x.device)


def conditional(m, x, n):
    return torch.cond(n.sum() > 2, torch.sin, torch.cos, (x,))


def conditional_loop(m, x, n):
    return torch.while_loop(lambda n, x: n.sum() < 9, lambda n, x: (n + 1, x * 2), (n, x))


OFFENDERS = {
    item: "host sync", tolist: "host sync", to_int: "host sync", index: "host sync", sized_by_a_tensor: "host sync",
    printed: "host sync", branch: "branch", compared: "branch", contained: "branch", cpu: "copy to host",
    to_cpu: "copy to host", numpy: "copy to host", new_tensor: "copy to device", made_on_the_device: "copy to device",
    moved: "copy to device", host_tensor: "host tensor", host_indices: "host tensor",
    nonzero: "data-dependent shape", unique: "data-dependent shape", boolean_index: "data-dependent shape",
    range_to_a_tensor: "host sync", range_of_logarithms: "host sync", conditional: "branch", conditional_loop: "branch",
    repeated: "data-dependent shape", own_generator: "own generator",
    write_count: "write count",
}  # fmt: skip


def dropped_in_eval(m, x, n):
    return nn.functional.dropout(x, 0.5, training=False)


def repeated_to_a_size(m, x, n):
    return torch.repeat_interleave(x[:2], n, output_size=4)


def host_arithmetic(m, x, n):
    return x * torch.arange(3).tolist()[-1] * torch.ones(2).sum()


def attention(m, x, n):
    q = x[None, None, :, None].expand(1, 1, 4, 8)
    return nn.functional.scaled_dot_product_attention(q, q, q)


def mapped(m, x, n):
    return torch.vmap(lambda row: row * 2)(x)


HARMLESS = [mapped, dropped_in_eval, repeated_to_a_size, host_arithmetic, attention]


def call():
    return torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1, 3])


@given(st.lists(st.sampled_from([*OFFENDERS, *HARMLESS]), max_size=8))
@settings(max_examples=30, deadline=None)
def test_all_offenders_are_found_at_once_and_nothing_else(functions):
    def forward(m, x, n):
        for function in functions:
            function(m, x, n)

    expected = {(OFFENDERS[function], function.__name__) for function in functions if function in OFFENDERS}
    came = found(forward, call())
    assert set(came) == expected
    assert len(came) == len(expected)  # a line that ran several times is one finding


@pytest.mark.parametrize("function", [*OFFENDERS, *HARMLESS])
def test_the_doctor_finds_what_a_capture_refuses(function):
    example = call()
    findings = list(vg.diagnose(Of(function), example))
    with nullcontext() if function in HARMLESS else pytest.raises(vg.errors.CaptureError) as error:
        TapeCapture().capture(lambda: function(None, *example), "the test")
    assert len(findings) == (function in OFFENDERS)
    assert all(finding.what in str(error.value) for finding in findings)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Of(lambda m, x, n: x.split(n.tolist())[0] if n is not None else x)

    def forward(self, x, n):
        self.attn(x, n)
        return x


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x, n):
        longest = n.max().item()
        for block in self.blocks:
            x = block(x, n)
        return x * longest


def test_a_finding_names_line_module_count_reason_and_buffer():
    calls = [(torch.ones(4), torch.tensor(lengths)) for lengths in ([3, 1], [2, 2])]
    longest, split, frozen_longest = vg.diagnose(Tower(), *calls)
    assert (longest.kind, longest.line.function, longest.line.source) == (
        "host sync",
        "forward",
        "longest = n.max().item()",
    )
    assert longest.line.file == __file__
    assert (longest.declaration, longest.modules, longest.count, longest.blocks) == ("MaxSeqlen", ("",), 1, True)
    assert "Host code does not run during a replay" in longest.why
    assert (split.kind, split.modules, split.count) == ("host sync", ("blocks.*.attn",), 3)
    assert "CuSeqlens" in split.declaration
    assert "split_sizes of aten.split_with_sizes.default is (3, 1) in call 1, (2, 2) in call 2" in split.what
    assert (frozen_longest.kind, frozen_longest.line.source) == ("frozen value", "return x * longest")


def test_what_runs_on_after_an_offender_is_still_told_apart():
    """On the CPU a copy returns the same tensor: afterwards one of them is the host's, and the other is not."""

    def forward(m, x):
        on_host = x.cpu()
        number = on_host.sum().item()  # of the host: no sync
        back = on_host.to(x.device)
        back.sum().item()
        x.sum().item()
        return x + back * number

    kinds = [kind for kind, _ in found(forward, torch.ones(4))]
    assert kinds == ["copy to host", "copy to device", "host sync", "host sync"]


def cached_indices(m, x):
    if x.shape not in HOST_CACHE:
        HOST_CACHE[x.shape] = torch.arange(len(x) - 1, -1, -1)
    return x[HOST_CACHE[x.shape]]


HOST_CACHE = {}


def test_host_tensors_of_earlier_runs_are_still_the_hosts():
    def lazily(m, x):
        if not hasattr(m, "order"):
            m.order = torch.arange(len(x))
        return x[m.order]

    HOST_CACHE.clear()
    assert found(cached_indices, torch.ones(4)) == [("host tensor", "cached_indices")]
    assert found(lazily, torch.ones(4)) == [("host tensor", "lazily")]


def test_calls_are_dicts_tuples_or_single_arguments():
    def forward(m, x, scale=1.0):
        return x * scale

    for one in (torch.ones(4), (torch.ones(4), 2.0), {"x": torch.ones(4), "scale": 2.0}):
        assert vg.diagnose(Of(forward), one).ok
    with pytest.raises(vg.errors.InputError, match="got no example calls"):
        vg.diagnose(Of(forward))
    with pytest.raises(vg.errors.InputError, match=r"got a function: expected a torch\.nn\.Module"):
        vg.diagnose(forward, torch.ones(4))


def test_modules_whose_lines_or_weights_are_not_there_are_refused():
    call = torch.ones(3, 4)
    for script in (torch.jit.script(nn.Linear(4, 4)), torch.jit.trace(nn.Linear(4, 4), call)):
        with pytest.raises(vg.errors.InputError, match=r"torch\.jit has compiled.*pass the module that it was made of"):
            vg.diagnose(script, call)
    lazy = nn.LazyLinear(4)
    with pytest.raises(vg.errors.InputError, match=r"weights are made in its first call.* call it once before"):
        vg.diagnose(lazy, call)
    lazy(call)
    assert vg.diagnose(lazy, call).ok


def test_complex_rows_are_diagnosed():
    assert vg.diagnose(nn.Linear(4, 4, dtype=torch.complex64), torch.ones(3, 4, dtype=torch.complex64)).ok


def frozen(function, *calls):
    return [f for f in vg.diagnose(Of(function), *calls) if f.kind.startswith("frozen")]


def test_a_max_seqlen_read_on_the_host_is_named_where_it_is_used():
    def forward(m, x, lengths):
        longest = lengths.max().item()
        return x.clamp(max=longest)

    (value,) = frozen(forward, *layouts([3, 5], [6, 2]))
    assert value.line.source == "return x.clamp(max=longest)"
    assert "max of aten.clamp.default is 5 in call 1, 6 in call 2, read from a tensor at" in value.what
    assert value.what.endswith(f"{Path(__file__).name}:{forward.__code__.co_firstlineno + 1}")
    assert not value.remedy.startswith("Declare vg")


def sized_by_the_longest(m, x, lengths):
    return torch.arange(max(lengths.tolist()), device=x.device)


@given(st.lists(st.integers(1, 19), min_size=2, max_size=4))
@settings(max_examples=30, deadline=None)
def test_a_number_is_named_if_and_only_if_a_layout_changes_it(firsts):
    calls = layouts(*([first, 20 - first] for first in firsts))  # as many rows and items
    named = [v for v in vg.diagnose(Of(sized_by_the_longest), *calls) if "of aten.arange" in v.what]
    longest = [max(first, 20 - first) for first in firsts]
    assert len(named) == (len(set(longest)) > 1)
    for value in named:
        assert value.kind == "host sync"  # of the same statement
        assert all(f"{own} in call {at}" in value.what for at, own in enumerate(longest, 1))


def test_an_arange_sized_in_python_is_named():
    def forward(m, x, lengths):
        return torch.arange(max(lengths), device=x.device)

    calls = [{"x": torch.ones(8, 4), "lengths": own} for own in ([3, 5], [6, 2])]
    (value,) = frozen(forward, *calls)
    assert "end of aten.arange.default is 5 in call 1, 6 in call 2" in value.what
    assert value.declaration == "MaxSeqlen"


def test_a_branch_on_the_number_of_images_is_named():
    def forward(m, x, lengths):
        x = x * 2
        if len(lengths) > 2:
            x = x + 1
            x = x.relu()
        return x

    (value,) = frozen(forward, *layouts([3, 5], [2, 2, 4]))
    assert (value.kind, value.line.source) == ("frozen branch", "if len(lengths) > 2:")
    assert value.what == "it ran 0 operations in call 1, 2 operations in call 2"


def test_a_loop_over_items_is_named_once_with_all_it_calls():
    def forward(m, x, lengths):
        total = torch.zeros_like(x)
        for length in lengths.unbind():
            total = total + norm(x * length)
        return total

    proof, value = vg.diagnose(Of(forward), *layouts([3, 5], [2, 2, 4]))
    assert (proof.kind, proof.blocks) == ("wrong replay", True)  # padding items take part in its mean
    assert (value.kind, value.blocks) == ("padded size", False)  # a graph has a turn for each item of its budget
    assert value.line.source == "for length in lengths.unbind():"
    assert value.what == "it ran 8 operations in call 1, 12 operations in call 2"


def norm(x):
    if x.dim() > 1:
        x = x - x.mean()
    return x


def test_an_early_return_is_named():
    def forward(m, x, lengths):
        x = x * 2
        if len(lengths) == 1:
            return x
        x = x + 1
        return x.relu()

    (value,) = frozen(forward, *layouts([8], [3, 5]))
    assert (value.kind, value.line.source) == ("frozen branch", "if len(lengths) == 1:")


def test_what_follows_from_sizes_is_not_named():
    def forward(m, x, lengths):
        items, rows = len(lengths), len(x)
        cu_seqlens = torch.zeros(items + 1, dtype=torch.int32, device=x.device)
        cu_seqlens[1:] = lengths.cumsum(0)
        queries = m.weight.repeat(items * 2, 1).view(items, 2, 4)
        position = torch.arange(rows, device=x.device).reshape(2, -1)
        table = torch.meshgrid(torch.arange(items, device=x.device), lengths, indexing="ij")
        return cu_seqlens, queries, position, table

    assert vg.diagnose(Of(forward), *layouts([3, 5], [2, 2, 4], [8], [1, 1, 1, 5])).ok


def test_rows_of_another_number_are_not_compared_and_the_report_says_so():
    def forward(m, x, lengths, bound):
        return x.clamp(max=len(x))

    def diagnose(*lengths):
        return vg.diagnose(Of(forward), *({**call, "bound": 8} for call in layouts(*lengths)))

    diagnosis = diagnose([3, 5], [6, 1], [4, 4])
    assert "frozen value" not in [finding.kind for finding in diagnosis]
    assert "Note: call 2 could not be checked for frozen values" in str(diagnosis)
    assert "Note: calls 1, 2 could not be checked" in str(diagnose([3, 5], [6, 1]))
    assert not diagnose([3, 5], [6, 2]).notes


def test_calls_that_the_doctor_compared_with_calls_of_its_own_get_no_note():
    def forward(m, x, lengths):
        return x.clamp(max=len(x))

    assert not vg.diagnose(Of(forward), *layouts([3, 5], [6, 1])).notes


def test_arguments_that_are_numbers_are_named():
    def forward(m, x, max_seqlen):
        return x.clamp(max=max_seqlen)

    (value,) = frozen(forward, *({"x": torch.ones(4), "max_seqlen": n} for n in (3, 4)))
    assert value.what.endswith("the argument 'max_seqlen'")
    assert value.declaration == "MaxSeqlen"


def test_a_host_scalar_that_follows_the_layout_is_named():
    def forward(m, x, lengths):
        return x / torch.tensor(float(max(lengths)))

    (value,) = frozen(forward, *({"x": torch.ones(8), "lengths": own} for own in ([3, 5], [6, 2])))
    assert "other of aten.div.Tensor is 5.0 in call 1, 6.0 in call 2" in value.what


def test_a_number_that_changes_from_run_to_run_is_named():
    generator = random.Random(0)

    def forward(m, x):
        return x * generator.random()

    (value,) = frozen(forward, torch.ones(4))
    assert "the second run of call 1" in value.what


def test_a_branch_that_another_run_takes_otherwise_is_named():
    def forward(m, x):
        m.runs = getattr(m, "runs", 0) + 1
        return x * 2 if m.runs % 2 else x

    (value,) = frozen(forward, torch.ones(4))
    assert value.what == "it ran 0 operations in the second run of call 1, 1 operation in the third run"


class Chooses(nn.Module):
    """Takes other weights for another number of items."""

    def __init__(self, choose):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(4))
        self.plain = [torch.ones(4), torch.zeros(4)]
        self.choose = choose

    def forward(self, x, lengths):
        return self.choose(self, x, len(lengths))


@pytest.mark.parametrize(
    ("choose", "says"),
    [
        (lambda m, x, n: m.experts[n](x), "is the module's experts.2.weight in call 1, the module's experts.3.weight"),
        (lambda m, x, n: x * m.scales[n], "other of aten.mul.Tensor is the module's scales.2 in call 1"),
        (lambda m, x, n: x * m.plain[n > 2], "is the module's plain[0] in call 1, the module's plain[1] in call 2"),
        (lambda m, x, n: torch.stack([m.scales[n], x[0]]), "tensors[0] of aten.stack.default is the module's scales.2"),
    ],
)
def test_weights_that_the_layout_chooses_are_named(choose, says):
    (value,) = vg.diagnose(Chooses(choose), *layouts([3, 5], [2, 2, 4]))
    assert value.kind == "frozen value"
    assert says in value.what
    (value,) = vg.diagnose(Chooses(choose), *layouts([3, 5], [2, 6]))
    assert "in call 1 with lengths [3, 2, 3]" in value.what


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, lengths: x / len(lengths),
        lambda m, x, lengths: x * len(x),
        lambda m, x, lengths: x / len(x) ** 0.5,
        lambda m, x, lengths: torch.full((4,), len(lengths), dtype=x.dtype, device=x.device) + x,
        lambda m, x, lengths: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], scale=1 / len(x)),
    ],
)
def test_arithmetic_with_the_number_of_rows_or_items_is_worth_knowing(function):
    diagnosis = vg.diagnose(Of(function), *layouts([3, 5], [3, 3, 6]))
    *proof, finding = diagnosis
    assert (finding.kind, finding.blocks) == ("padded size", False)
    assert [one.kind for one in proof] in ([], ["wrong replay"])  # where the proof can run the module
    assert "in call 1" in finding.what
    assert "DeviceBuffer" in finding.remedy


def test_sizes_and_constants_are_no_arithmetic_with_the_number_of_rows():
    norm = nn.LayerNorm(4, eps=1e-3)

    def forward(m, x, lengths):
        rows, items = len(x), len(lengths)
        heads = norm(x).reshape(rows, 2, 2).transpose(0, 1)
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, scale=2**-0.5)
        index = torch.arange(rows, device=x.device).clamp(max=rows - 1) % rows
        line = torch.linspace(0, rows - 1, rows, device=x.device)
        table = x.new_zeros(items, 4).index_add(0, index % items, x[index])
        return attended.mean(), nn.functional.dropout(table, 0.1, training=False), line, x.expand(items, -1, -1)

    assert not list(vg.diagnose(Of(forward), *layouts([3, 5], [2, 3, 3], [3, 3, 6], [7])))


def test_a_layout_that_is_the_same_shows_nothing():
    def forward(m, x, lengths):
        return [part * 2 for part in x.split(lengths.tolist())]

    assert not frozen(forward, *layouts([3, 5], [3, 5]))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: torch.full_like(x, torch.nan),
        lambda m, x: x.masked_fill(x > 0, float("nan")),
        lambda m, x: x.new_full((4,), float("nan")),
        lambda m, x: x.clamp(min=float("nan")),
        lambda m, x: torch.where(x > 0, x, float("nan")),
    ],
)
def test_nan_is_the_same_in_all_runs(function):
    assert not list(vg.diagnose(Of(function), torch.ones(4), torch.ones(4)))


def cached_once(m, x):
    if not hasattr(m, "table"):
        m.table = torch.arange(4.0, device=x.device)
    return x[0] + m.table


def cached_by_size(m, x):
    m.tables = getattr(m, "tables", {})
    if x.shape[0] not in m.tables:
        m.tables[x.shape[0]] = torch.ones(x.shape, device=x.device)
    return x + m.tables[x.shape[0]]


def remembered(m, x):
    m.last = x * 2
    return m.last + 1


def input_changed(m, x):
    return x.add_(1)


def weight_changed(m, x):
    m.weight.mul_(2)
    return x + m.weight


def dropped(m, x):
    return nn.functional.dropout(x, 0.5)


@pytest.mark.parametrize(
    ("function", "kind", "says", "blocks"),
    [
        (cached_once, "lazy cache", "float32 [4], made in the first run of call 1", False),
        (remembered, "kept memory", "it keeps float32 [2, 4]", False),
        (input_changed, "input written", "writes into the argument 0", False),
        (weight_changed, "state written", "writes into the module's weight", True),
        (dropped, "random numbers", "draws random numbers", False),
    ],
)
def test_what_a_run_leaves_behind_is_told(function, kind, says, blocks):
    diagnosis = vg.diagnose(Of(function), torch.ones(2, 4))
    (finding,) = diagnosis
    assert (finding.kind, finding.line.function) == (kind, function.__name__)
    assert says in finding.what
    assert finding.blocks == blocks == (not diagnosis.ok)


def test_a_cache_that_another_layout_fills_anew_stands_in_the_way():
    (finding,) = vg.diagnose(Of(cached_by_size), torch.ones(2, 4), torch.ones(3, 4))
    assert finding.kind == "cache by layout"
    assert "in the first run of call 1 only" in finding.what
    assert "in the first run of call 2 only" in finding.what


def rebuffered(m, x):
    m.register_buffer("count", m.count + 1)
    return x + m.count


def reweighted(m, x):
    m.weight.data = m.weight.data * 2
    return x + m.weight


def advanced(m, x):
    m.state = getattr(m, "state", torch.zeros(4, device=x.device)) + 1
    return x + m.state


@pytest.mark.parametrize(("function", "name"), [(rebuffered, "count"), (reweighted, "weight"), (advanced, "state")])
def test_state_that_a_run_replaces_stands_in_the_way(function, name):
    module = Of(function)
    module.register_buffer("count", torch.zeros(4))
    (finding,) = vg.diagnose(module, torch.ones(2, 4))
    assert (finding.kind, finding.what, finding.blocks) == ("state written", f"it replaces the module's {name}", True)
    assert finding.line.function == function.__name__


def test_inference_mode_changes_nothing():
    with torch.inference_mode():
        assert found(input_changed, torch.ones(4)) == [("input written", "input_changed")]
    module = Of(weight_changed)
    with torch.inference_mode():
        assert [finding.kind for finding in vg.diagnose(module, torch.ones(4))] == ["state written"]


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (lambda m, x: x @ m.table, lambda: torch.ones(2, 4)),
        (lambda m, x: torch.sparse.mm(x.to_sparse(), x), lambda: torch.eye(4)),
        (lambda m, x: x.to_sparse_csr() @ x, lambda: torch.eye(4)),
        (lambda m, x: x.to_dense(), lambda: torch.eye(4).to_sparse()),
        (lambda m, x: torch.nested.nested_tensor(list(x.split([1, 3]))).to_padded_tensor(0), lambda: torch.ones(4, 4)),
        (lambda m, x: x.to_padded_tensor(0), lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(3)])),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant):UserWarning", "ignore:The PyTorch API of nested:UserWarning")
def test_sparse_and_nested_tensors_are_found_and_refused(function, argument):
    module = Of(function)
    module.register_buffer("table", torch.eye(4).to_sparse())
    assert "sparse tensor" in {finding.kind for finding in vg.diagnose(module, argument())}
    with pytest.raises(vg.errors.CaptureError, match=r"sparse or nested|host"):
        TapeCapture().capture(lambda: function(module, argument()), "the test")


def test_tensors_of_a_call_stay_as_they_were():
    x = torch.ones(4)
    vg.diagnose(Of(input_changed), x)
    assert x.tolist() == [1.0] * 4


def counted(m, x):
    m.calls = getattr(m, "calls", 0) + 1
    m.seen = [*getattr(m, "seen", []), len(x)]
    return x * 2


@pytest.mark.parametrize("function", [cached_once, cached_by_size, remembered, weight_changed, rebuffered, counted])
def test_a_module_keeps_what_one_call_leaves_behind(function):
    module, once = Of(function), Of(function)
    for one in (module, once):
        one.register_buffer("count", torch.zeros(4))
    calls = [torch.ones(2, 4), torch.ones(3, 4), torch.ones(2, 4)]
    once(calls[0])
    weight = module.weight
    vg.diagnose(module, *calls)
    assert module.weight is weight
    flat, expected = (torch.utils._pytree.tree_flatten(vars(one)) for one in (module, once))
    assert flat[1] == expected[1]
    for own, other in zip(flat[0], expected[0], strict=True):
        assert torch.equal(own, other) if isinstance(own, torch.Tensor) else own == other


def test_globals_that_raise_at_any_access_are_left_alone():
    class Raises:
        def __getattribute__(self, name):
            raise RuntimeError(f"{name} was read")

    code = types.ModuleType("code")
    exec(
        textwrap.dedent("""
            import torch
            ABSENT = None

            class Uses(torch.nn.Linear):
                def forward(self, x):
                    if x.shape[1] > 4:
                        return ABSENT(x)
                    return super().forward(x)
        """),
        vars(code),
    )
    code.ABSENT = Raises()
    assert vg.diagnose(code.Uses(4, 4).eval(), torch.ones(3, 4)).ok


def test_running_statistics_are_state():
    diagnosis = vg.diagnose(nn.BatchNorm1d(4).train(), torch.randn(8, 4))
    assert {f.kind for f in diagnosis} == {"state written"}
    assert "num_batches_tracked" in diagnosis.findings[0].what


def test_a_run_that_raises_is_told_with_what_came_before():
    def forward(m, x, lengths):
        m.weight * lengths.max().item()
        m.kept = x * 2
        return x @ x[:1, :3] if len(lengths) > 1 else x

    sync, error, *others = vg.diagnose(Of(forward), *layouts([3, 5], [8]))
    assert (sync.kind, error.kind, error.count) == ("host sync", "error", 1)
    assert re.match(r"it raised RuntimeError: (mm: )?mat1 and mat2 shapes cannot be multiplied", error.what)
    assert error.line.source == "return x @ x[:1, :3] if len(lengths) > 1 else x"
    assert [other.kind for other in others] == ["kept memory"]  # of the call that came through
    (nested,) = vg.diagnose(nn.Sequential(nn.ReLU(), Of(lambda m, x: x[9])), torch.ones(4))
    assert (nested.kind, nested.modules) == ("error", ("1",))
    (wrong,) = vg.diagnose(nn.Linear(4, 4), {"x": torch.ones(4)})
    assert "unexpected keyword argument 'x'" in wrong.what
    assert vg.diagnose(Of(lambda m, x: x * 2), torch.ones(2)).ok  # nothing watches any more


def test_a_diagnosis_is_text_with_colour_and_json():
    diagnosis = vg.diagnose(Tower(), (torch.ones(4), torch.tensor([3, 1])))
    text = str(diagnosis)
    assert text.startswith("Tower, 1 call: 2 findings prevent a correct graph")
    for words in (
        "1. host sync: ",
        "longest = n.max().item()",
        "(blocks.*.attn)",
        "3 times a call",
        "Declare MaxSeqlen.",
    ):
        assert words in text
    assert "\x1b" not in text
    assert "\x1b[31mhost sync\x1b[0m" in diagnosis.text(color=True)
    told = json.loads(diagnosis.to_json())
    assert told["ok"] is diagnosis.ok is False
    assert [f["kind"] for f in told["findings"]] == [f.kind for f in diagnosis]
    assert told["findings"][0]["line"]["source"] == "longest = n.max().item()"
    assert len(diagnosis) == 2


@pytest.fixture
def scale(monkeypatch):
    """Return a kernel of the interpreter, whose switch is read where a kernel is decorated."""
    import triton
    import triton.language as tl

    monkeypatch.setenv("TRITON_INTERPRET", "1")

    @triton.jit
    def scale(x, out, longest, BLOCK: tl.constexpr):  # noqa: N803
        at = BLOCK * tl.program_id(0) + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at) * longest)

    return scale


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_triton_launch_outside_of_any_operator_is_refused_by_the_proof(scale):
    class Scale(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            out = torch.empty_like(x)
            scale[(len(x),)](x, out, 3.0, BLOCK=4)
            return out

    module = Scale(4, 4).eval()
    finding, *_ = vg.diagnose(module, torch.ones(16, 4))
    assert finding.kind == "wrong replay"
    assert "torch.library.custom_op" in finding.remedy
    encoder = vg.GraphedEncoder(module, [64], vg.BufferSpec(vg.inputs.Rows("x"), vg.Lengths()), backend="tape")
    for _ in range(2):
        rows = torch.randn(5, 4)
        assert torch.equal(encoder(rows, lengths=[2, 3]), module(rows))
    assert encoder.stats.replays.total() == 0
    assert "launches a Triton kernel outside of any operator" in encoder.report()


FACTORIES = """
    import torch

    class Reads(torch.nn.Module):
        def forward(self, x):
            return x * x.max().item()

    def bad():
        return Reads(), torch.ones(3)

    def good():
        return torch.nn.Linear(3, 3), (torch.ones(2, 3),)

    def nothing():
        return torch.nn.Linear(3, 3)

    def raises():
        raise ValueError("no weights here")

    def leaves():
        raise SystemExit(0)

    def needs(path):
        return good()

    def listed():
        return [torch.nn.Linear(3, 3), torch.ones(3)]

    def wrong_call():
        return Reads(), (torch.ones(3), 1)

    number = 3
"""

BROKEN = {"no_name": "from torch import does_not_exist", "no_python": "def f(:", "leaving": "raise SystemExit(0)"}


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "factories.py").write_text(textwrap.dedent(FACTORIES))
    for name, source in BROKEN.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("factories", None)


def test_the_command_says_by_its_status_whether_something_stands_in_the_way(factories, capsys):
    assert main(["doctor", "factories:bad"]) == 1
    text = capsys.readouterr().out
    assert "return x * x.max().item()" in text
    assert "\x1b" not in text  # no terminal
    assert main(["doctor", "factories:bad", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert main(["doctor", "factories:wrong_call"]) == 1
    assert "error: it raised TypeError" in capsys.readouterr().out
    assert main(["doctor", "factories:good"]) == 0
    assert capsys.readouterr().out.startswith("Linear, 1 call: nothing prevents a correct graph\n")


def test_a_terminal_gets_colour_unless_it_wants_none(factories, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    main(["doctor", "factories:bad"])
    assert "\x1b[31m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    main(["doctor", "factories:bad"])
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("factories", "expected package.module:function"),
        ("nowhere:bad", "cannot be found"),
        ("factories:nowhere", "cannot be found"),
        ("factories:nothing", "expected a tuple (module, call, call, ...)"),
        ("factories:listed", "expected a tuple (module, call, call, ...)"),
        ("factories:raises", "'factories:raises' raised an error: ValueError: no weights here\n  at "),
        ("factories:raises", 'in raises: raise ValueError("no weights here")'),
        ("factories:leaves", "SystemExit: 0"),
        ("factories:needs", "cannot be called without arguments: TypeError"),
        ("factories:number", "cannot be called without arguments: TypeError"),
        ("no_name:f", "'no_name' cannot be imported: ImportError"),
        ("no_python:f", "'no_python' cannot be imported: SyntaxError"),
        ("leaving:f", "'leaving' cannot be imported: SystemExit"),
    ],
)
def test_the_command_says_what_is_wrong_with_a_factory(factories, capsys, factory, says):
    with pytest.raises(SystemExit) as exit:
        main(["doctor", factory])
    assert exit.value.code == 2
    assert says in capsys.readouterr().err


def test_a_diagnosis_hooks_no_module_of_other_threads():
    def forward(m, x):
        during.append([*map(len, hooks)])
        return x * 2

    hooks = [own for name, own in vars(nn.modules.module).items() if name.endswith("_hooks") and isinstance(own, dict)]
    before, during = [*map(len, hooks)], []
    assert vg.diagnose(Of(forward), torch.ones(4)).ok
    assert during == [before] * len(during) != []
