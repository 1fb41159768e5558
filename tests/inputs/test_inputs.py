"""`inputs.PerRow`, `PerItem` and `PerCall`: an entry a row, an entry an item, or one shape in all calls."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.support.inputs import BUDGETS, SPECS, Mixed, call_of, check_inputs_contract, expected
from tests.support.towers import distance, equal_bits

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=6)


def encoder_for(kind, **options):
    return vg.GraphedEncoder(Mixed().eval(), BUDGETS[kind], SPECS[kind], **({"backend": "tape"} | options))


@pytest.mark.parametrize("kind", SPECS)
def test_the_padding_contract_holds(kind):
    check_inputs_contract(encoder_for(kind), kind, "cpu")


@pytest.mark.parametrize("kind", SPECS)
def test_any_call_gives_what_the_module_gives(kind):
    encoder = encoder_for(kind, verify=vg.options.Verify(strict=True)).capture()

    @settings(max_examples=30)
    @given(LENGTHS, st.booleans(), st.booleans(), st.integers(0, 5))
    def check(lengths, with_kinds, numbers, seed):
        call = call_of(kind, lengths, seed, with_kinds=with_kinds, numbers=numbers)
        assert distance(encoder(**call), expected(encoder.module, kind, call, lengths)) < 1e-5

    check()
    assert encoder.stats.replays


def test_calls_are_split_and_items_too_large_for_graphs_run_eager():
    encoder, lengths = encoder_for("packed"), [60, 50, 3, 40, 100, 7]
    call = call_of("packed", lengths)
    assert distance(encoder(**call), expected(encoder.module, "packed", call, lengths)) < 1e-5
    assert encoder.stats.replays.total() > 1
    assert encoder.stats.eager == {"larger than every budget": 1}


def test_items_that_only_the_device_knows():
    encoder, lengths = encoder_for("packed"), [5, 9]
    call = call_of("packed", lengths) | {"lengths": torch.tensor(lengths)}
    assert distance(encoder(**call), expected(encoder.module, "packed", call, lengths)) < 1e-5
    assert not encoder.stats.eager


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_a_stage_takes_them_beside_the_layout(kind):
    encoder, lengths = encoder_for(kind), [5, 9]
    call = call_of(kind, lengths)
    rows, layout, *_ = call.pop("ids"), call.pop("lengths")
    with encoder.stage(layout, **call) as stage:
        stage.rows.copy_(rows)
    assert equal_bits(stage.output, encoder(ids=rows, lengths=layout, **call))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=str)
def test_what_a_call_leaves_out_has_its_default_whatever_came_before(dtype):
    inputs = [
        vg.inputs.PerRow("a_row", (), dtype, default=3),
        vg.inputs.PerItem("an_item", (), dtype, default=5, per_row=True),
    ]
    inputs += [vg.inputs.PerCall("a_call", (), dtype, default=7)]
    spec = vg.BufferSpec(vg.inputs.Rows("x", (2,)), vg.Lengths(), inputs=inputs)
    budgets = [vg.budgets.Budget(16, items=2), vg.budgets.Budget(64, items=4)]
    encoder = vg.GraphedEncoder(Casts().eval(), budgets, spec, backend="tape").capture()
    for lengths in ([9], [30, 20], [40, 2], [5]):
        x, rows, items = torch.zeros(sum(lengths), 2), sum(lengths), len(lengths)
        own = {"a_row": torch.full((rows,), 20), "an_item": torch.full((items,), 30), "a_call": torch.tensor(40)}
        own = {name: value.to(dtype) for name, value in own.items()}
        for brought, want in (({}, 15), (own, 90), ({}, 15), ({"a_call": own["a_call"]}, 48)):
            assert encoder(x, lengths=lengths, **brought).unique().tolist() == [want]
        with encoder.stage(lengths) as stage:
            stage.rows.zero_()
        assert stage.output.unique().tolist() == [15]


class Adds(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x, y):
        return x * self.one + y


def test_gradients_reach_the_inputs():
    spec = vg.BufferSpec(vg.inputs.Rows("x", (8,)), vg.Lengths(), inputs=[vg.inputs.PerRow("y", (8,))])
    encoder = vg.GraphedEncoder(Adds().eval(), [64], spec, backend="tape")
    x, y = torch.randn(6, 8), torch.randn(6, 8, requires_grad=True)
    with torch.enable_grad():
        encoder(x, y=y, lengths=[6]).sum().backward()
    assert torch.equal(y.grad, torch.ones(6, 8))


class Positions(nn.Module):
    """Adds the sum of three positions to each row."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 8)

    def forward(self, x, position_ids):
        assert position_ids.is_contiguous()
        return x + self.table(position_ids).sum(0)


def test_rows_may_lie_in_another_dimension():
    inputs = [vg.inputs.PerRow("position_ids", (3,), torch.int64, rows_dim=1)]
    spec = vg.BufferSpec(vg.inputs.Rows("x", (8,)), vg.Lengths(), inputs=inputs)
    encoder = vg.GraphedEncoder(
        Positions().eval(),
        [vg.budgets.Budget(64, items=2)],
        spec,
        backend="tape",
        verify=vg.options.Verify(strict=True),
    )
    for lengths in ([6], [20, 30, 40]):
        x, ids = torch.randn(sum(lengths), 8), torch.randint(16, (3, sum(lengths)))
        assert distance(encoder(x, position_ids=ids, lengths=lengths), encoder.module(x, ids)) < 1e-6


UNCOMMON = [torch.bool, torch.uint8, torch.uint16, torch.int32, torch.float16, torch.bfloat16, torch.float64]


class Casts(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x, a_row, an_item, a_call):
        parts = a_row.float(), an_item.float(), a_call.float()
        return x * self.one + parts[0][:, None] + parts[1][:, None] + parts[2]


@pytest.mark.parametrize("dtype", UNCOMMON, ids=str)
def test_any_dtype_is_copied_as_it_is(dtype):
    inputs = [
        vg.inputs.PerRow("a_row", (), dtype),
        vg.inputs.PerItem("an_item", (), dtype, per_row=True),
        vg.inputs.PerCall("a_call", (), dtype),
    ]
    spec = vg.BufferSpec(vg.inputs.Rows("x", (8,)), vg.Lengths(), inputs=inputs)
    encoder = vg.GraphedEncoder(
        Casts().eval(), [vg.budgets.Budget(32, items=2)], spec, backend="tape", verify=vg.options.Verify(strict=True)
    )
    values = (torch.arange(1, 80) % 2 if dtype is torch.bool else torch.arange(1, 80)).to(dtype)
    for lengths in ([3], [20, 9, 30]):
        x, rows = torch.zeros(sum(lengths), 8), sum(lengths)
        items = values[: len(lengths)]
        got = encoder(x, a_row=values[:rows], an_item=items, a_call=values[2], lengths=lengths)
        each = items.float().repeat_interleave(torch.tensor(lengths))
        want = values[:rows].float() + each + values[2].float()
        assert torch.equal(got, want[:, None].expand(-1, 8))


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("dtype", [*UNCOMMON, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_any_dtype_is_padded_in_a_batch(dtype, packs):
    class Handed(nn.Module):
        def forward(self, x, own):
            return {"x": x, "own": own}

    rows, inputs = vg.inputs.Rows("x", (2,), dtype), [vg.inputs.PerRow("own", (2,), dtype)]
    layout = vg.Mask(packed=True) if packs else vg.Mask()
    spec = vg.BufferSpec(rows, layout, outputs=vg.outputs.Rows(), inputs=inputs)
    budgets = [vg.budgets.Budget.padded(2, 8), vg.budgets.Budget.padded(2, 16)]
    encoder = vg.GraphedEncoder(Handed().eval(), budgets, spec, backend="tape", verify=vg.options.Verify(strict=True))
    x, own = ((torch.rand(3, 12, 2) > 0.5).to(dtype) for _ in range(2))
    real = torch.arange(12) < torch.tensor([12, 5, 1])[:, None]
    for run in (encoder, encoder.eager):
        for name, out in run(x, own=own, attention_mask=real).items():
            assert out.dtype == dtype
            assert torch.equal(out[real].float(), {"x": x, "own": own}[name][real].float())
            assert not out[~real].float().any()


def test_numbers_come_without_loss():
    class Handed(nn.Module):
        def forward(self, x, exact, small):
            return {"x": x, "exact": exact, "small": small}

    inputs = [vg.inputs.PerItem("exact", dtype=torch.float64), vg.inputs.PerItem("small", dtype=torch.uint8)]
    spec = vg.BufferSpec(
        "x", vg.Lengths(), outputs={n: vg.outputs.Items() for n in ("exact", "small")} | {"x": vg.outputs.Rows()}
    )
    encoder = vg.GraphedEncoder(Handed().eval(), [16], dataclasses.replace(spec, inputs=inputs), backend="tape")
    for run in (encoder, encoder.eager):
        out = run(torch.zeros(3, 2), exact=[0.1, 1 / 3], small=[200, 3], lengths=[1, 2])
        assert out["exact"].tolist() == [0.1, 1 / 3]
        assert out["small"].tolist() == [200, 3]
    for wrong in ([300, 3], [-1, 3], [0.5, 3], torch.tensor([200, 3])):
        with pytest.raises(vg.errors.InputError, match=r"small is torch.*: expected torch.uint8"):
            encoder(torch.zeros(3, 2), exact=[0.1, 1 / 3], small=wrong, lengths=[1, 2])


@pytest.mark.parametrize("value", [999, torch.tensor([999.0]), torch.tensor([999.0], dtype=torch.float64)])
def test_what_the_dtype_of_the_module_would_round_is_not_cast_unless_that_is_declared(value):
    class Waves(nn.Linear):
        def forward(self, x, t):
            return super().forward(x) + (t.float() * 0.5).cos().to(x.dtype)[:, None]

    torch.manual_seed(0)
    module, rows = Waves(4, 4).bfloat16(), torch.zeros(3, 4, dtype=torch.bfloat16)

    def encoder_of(dtype):
        inputs = [vg.inputs.PerItem("t", dtype=dtype, per_row=True)]
        spec = vg.BufferSpec("x", vg.Lengths(), inputs=inputs)
        return vg.GraphedEncoder(module.eval(), [16], spec, backend="tape")

    t = [value] if isinstance(value, int) else value
    with pytest.raises(
        vg.errors.InputError, match=r"t is torch.*would round them: declare PerItem\('t', dtype=torch.float32\)"
    ):
        encoder_of(None)(rows, t=t, lengths=[3])
    assert encoder_of(None)(rows, t=torch.ones(1, dtype=torch.bfloat16), lengths=[3]).shape == rows.shape
    expected = module(rows, torch.full((3,), 999.0))
    assert torch.equal(encoder_of(torch.float32)(rows, t=t, lengths=[3]), expected)
    assert not torch.equal(encoder_of(torch.bfloat16)(rows, t=t, lengths=[3]), expected)


@pytest.mark.parametrize("name", ["kinds", "t", "prompt", "lengths"])
def test_freed_ones_are_refused_by_name(name):
    encoder, call = encoder_for("packed").capture(), call_of("packed", [5, 9])
    before = encoder(**call)
    freed = torch.tensor(call[name]) if name == "lengths" else call[name].clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(vg.errors.InputError, match=f"the memory of {name} was freed"):
        encoder(**(call | {name: freed}))
    assert equal_bits(encoder(**call), before)


WRONG = [
    ({"t": [0.5]}, vg.errors.LayoutError, r"t has \[1\] entries, but the call has 2 items"),
    (
        {"kinds": torch.zeros(3, dtype=torch.int64)},
        vg.errors.LayoutError,
        r"kinds has \[3\] entries, but the call has 14 rows",
    ),
    (
        {"kinds": torch.zeros(14)},
        vg.errors.InputError,
        "kinds is torch.float32: expected torch.int64.* convert it, or declare",
    ),
    ({"prompt": torch.zeros(4, 7)}, vg.errors.InputError, r"prompt is \[4, 7\]: expected \[4, 8\]"),
    ({"prompt": torch.zeros(4, 8).to_sparse()}, vg.errors.InputError, "prompt is a sparse, nested or meta tensor"),
    ({"t": ["a", "b"]}, vg.errors.InputError, "t is .*: expected a tensor, or numbers that make one"),
    ({"scale": None}, vg.errors.InputError, "argument 'scale' is missing"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG)
def test_wrong_ones_are_refused_by_name_and_harm_no_other_call(changes, error, message):
    encoder, call = encoder_for("packed").capture(), call_of("packed", [5, 9])
    before = encoder(**call)
    with pytest.raises(error, match=message):
        encoder(**(call | changes))
    assert equal_bits(encoder(**call), before)


UNDECLARED = [
    (torch.zeros(14), r"inputs=\[vg.inputs.PerRow\('y', \(\)\)\]"),
    (torch.zeros(14, 3, dtype=torch.int64), r"inputs=\[vg.inputs.PerRow\('y', \(3,\), dtype=torch.int64\)\]"),
    (torch.zeros(2, 8), r"inputs=\[vg.inputs.PerItem\('y', \(8,\)\)\]"),
    (torch.zeros(77, 8), r"inputs=\[vg.inputs.PerCall\('y', \(77, 8\)\)\]"),
    ([torch.zeros(2)], "arguments of their own"),
]


@pytest.mark.parametrize(("value", "declaration"), UNDECLARED)
def test_an_undeclared_tensor_is_told_its_declaration(value, declaration):
    spec = vg.BufferSpec(vg.inputs.Rows("x", (8,)), vg.Lengths())
    encoder = vg.GraphedEncoder(Adds().eval(), [64], spec, backend="tape")
    with pytest.raises(vg.errors.InputError, match=rf"'y' holds a tensor that is not declared.*declare.*{declaration}"):
        encoder(torch.zeros(14, 8), y=value, lengths=[5, 9])


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: vg.inputs.PerRow("y", ("a",)), "shape"),
        (lambda: vg.inputs.PerRow("y", (-1,)), "expected shape to be that of one entry"),
        (lambda: vg.inputs.PerRow("y", (3,), rows_dim=2), "rows_dim to be at most"),
        (lambda: vg.inputs.PerItem("y", (), torch.uint8, pad=-1), "pad=-1.*expected a value of torch.uint8"),
        (lambda: vg.inputs.PerCall("y", (), torch.int32, default=0.5), "default=0.5.*expected a value of torch.int32"),
        (lambda: vg.BufferSpec("x", vg.Lengths(), inputs="y"), "expected a list of PerRow, PerItem and PerCall"),
        (lambda: vg.BufferSpec("x", vg.Lengths(), inputs=[vg.inputs.PerRow("x")]), "declared more than once"),
        (lambda: vg.BufferSpec("x", vg.Mask(), inputs=[vg.inputs.PerItem("y", per_row=True)]), "leave per_row out"),
        (lambda: vg.BufferSpec("x", vg.Mask(), inputs=[vg.inputs.PerRow("y", (3,), rows_dim=1)]), "leave rows_dim out"),
    ],
)
def test_wrong_declarations_are_refused(declare, message):
    with pytest.raises(vg.errors.SpecError, match=message):
        declare()


def test_the_module_must_take_them():
    spec = vg.BufferSpec(vg.inputs.Rows("x", (8,)), vg.Lengths(), inputs=[vg.inputs.PerItem("t")])
    with pytest.raises(vg.errors.SpecError, match="Adds has no argument 't', but it is declared"):
        vg.GraphedEncoder(Adds(), [64], spec, backend="tape")


class MixesItems(nn.Module):
    """Adds to each row the mean of all items' entries, padding included."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x, t):
        return x * self.one + t.mean(0)


def test_what_mixes_the_entries_of_items_fails_the_proof():
    spec = vg.BufferSpec(vg.inputs.Rows("x", (8,)), vg.Lengths(), inputs=[vg.inputs.PerItem("t", (8,))])
    encoder = vg.GraphedEncoder(MixesItems().eval(), [vg.budgets.Budget(64, items=4)], spec, backend="tape")
    x, t = torch.randn(6, 8), torch.randn(2, 8)
    with pytest.warns(UserWarning, match="failed verification"):
        got = encoder(x, t=t, lengths=[2, 4])
    assert torch.equal(got, encoder.module(x, t))
    assert not encoder.stats.replays


def test_verification_permutes_them_with_their_items():
    encoder = encoder_for("packed")
    verified = encoder.verify([call_of("packed", [5, 9, 2]), call_of("packed", [40, 50, 20], seed=1)])
    assert verified.error < 1e-5
    assert math.isfinite(verified.error)
