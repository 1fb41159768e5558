"""Wrong input gets an error that says what came, what was expected and what to try; the encoder goes on working."""

import re
from itertools import count

import numpy
import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import Attention, attention_encoder, attention_spec, encoder_of
from tests.support.towers import distance, pixels, qwen3_vl_tower


@pytest.fixture(scope="module")
def tower():
    return qwen3_vl_tower(depth=2, deepstack_visual_indexes=[0])


@pytest.fixture(scope="module")
def encoder(tower):
    return vg.recipes.qwen3_vl(tower, [vg.budgets.Budget(128, items=4, segments=4)], backend="tape")


class PositionOnly(nn.Module):
    def forward(self, x, /, k=1):
        return x * k


def first_call(function):
    encoder_of(nn.Identity().eval(), forward=lambda module, x: function(x))(torch.zeros(2, 8), lengths=[2])


GRID = [(1, 4, 6), (1, 2, 4)]

ROWS = pixels(GRID)

CALLS = {
    "rows that do not match the grid": (
        (ROWS[:-1],), {"grid_thw": GRID}, vg.errors.LayoutError,
        "grid_thw describes 2 items of 32 rows in all, but hidden_states has 31 rows of shape [96]; pass all rows of e",
    ),
    "a grid not divisible by the merge size": (
        (ROWS,), {"grid_thw": [(1, 4, 6), (1, 1, 8)]}, vg.errors.LayoutError,
        "grid_thw[1] is (1, 1, 8): h and w must be divisible by the merge size 2; resize the input",
    ),
    "a size of zero": ((ROWS,), {"grid_thw": [(0, 4, 8)]}, vg.errors.LayoutError, "grid_thw describes 1 item of 0 rows in all, but"),
    "a negative size": ((ROWS,), {"grid_thw": [(1, 4, -6)]}, vg.errors.LayoutError, "grid_thw[0] is (1, 4, -6): every size"),
    "a size past int64": ((ROWS,), {"grid_thw": [(2**62, 4, 6)]}, vg.errors.LayoutError, "but hidden_states has 32 rows"),
    "an empty list": ((ROWS[:0],), {"grid_thw": []}, vg.errors.LayoutError, "grid_thw is empty: expected at least one item"),
    "sparse rows": (
        (ROWS.to_sparse(),), {"grid_thw": GRID}, vg.errors.InputError,
        "hidden_states is a sparse or nested tensor: expected a dense one, [rows, 96]; try hidden_states.to_dense()",
    ),
    "nested rows": (
        (torch.nested.nested_tensor([ROWS], layout=torch.jagged),), {"grid_thw": GRID}, vg.errors.InputError, "sparse or nested",
    ),
    "grids that do not make one tensor": (
        (ROWS,), {"grid_thw": [torch.tensor([1, 4, 6]), torch.tensor([1, 2])]}, vg.errors.LayoutError,
        "grid_thw is a list of tensors that do not make one",
    ),
    "grids of floats": ((ROWS,), {"grid_thw": [torch.ones(3)]}, vg.errors.LayoutError, "grid_thw is a torch.float32 tensor: exp"),
    "a range without end": (
        (ROWS,), {"grid_thw": range(10**30)}, vg.errors.LayoutError, "numbers, which cannot describe the items of",
    ),
    "the wrong device": (
        (ROWS.to("meta"),), {"grid_thw": GRID}, vg.errors.InputError,
        "hidden_states is on the meta device, where it has no values: expected it on cpu",
    ),
    "rows of the wrong width": (
        (ROWS[:, :-1],), {"grid_thw": GRID}, vg.errors.InputError,
        "hidden_states is [32, 95]: expected [rows, 96]; each row is [95], not [96]: they are made for another module",
    ),
    "rows with a batch dimension": (
        (ROWS[None],), {"grid_thw": GRID}, vg.errors.InputError,
        "hidden_states is [1, 32, 96]: expected [rows, 96], the rows of all items one after another, not a batch of",
    ),
    "rows of a boolean dtype": ((ROWS > 0,), {"grid_thw": GRID}, vg.errors.InputError, "hidden_states is torch.bool: expected"),
    "rows that are no tensor": (([[1.0]],), {"grid_thw": GRID}, vg.errors.InputError, "hidden_states is a list: expected a te"),
    "integer rows for floating graphs": (
        (ROWS.long(),), {"grid_thw": GRID}, vg.errors.InputError,
        "hidden_states is torch.int64: expected torch.float32; floating rows are cast, others are not",
    ),
    "a missing layout": ((ROWS,), {}, vg.errors.InputError, "argument 'grid_thw' is missing: the call needs ['grid_thw', 'hid"),
    "a misspelt layout": (
        (ROWS,), {"image_grid_thw": GRID}, vg.errors.InputError,
        "argument 'grid_thw' is missing: the call needs ['grid_thw', 'hidden_states'], and got ['image_grid_thw']",
    ),
    "missing rows": ((), {"grid_thw": GRID}, vg.errors.InputError, "argument 'hidden_states' is missing"),
    "an argument twice": (
        (ROWS,), {"hidden_states": ROWS, "grid_thw": GRID}, vg.errors.InputError, "'hidden_states' came twice, by position and",
    ),
    "an unknown tensor": (
        (ROWS,), {"grid_thw": GRID, "cu_seqlen": [torch.ones(1)]}, vg.errors.InputError,
        "argument 'cu_seqlen' holds a tensor that is not declared: a graph would keep reading the first one; leave it",
    ),
    "too many arguments": ((ROWS, GRID, 1, 2), {}, vg.errors.InputError, "got 4 positional arguments; Qwen3VLVisionModel takes"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "kwargs", "error", "message"), CALLS.values(), ids=CALLS.keys())
def test_bad_calls_raise_named_errors_and_leave_the_encoder_working(encoder, tower, args, kwargs, error, message):
    encoder(ROWS, grid_thw=GRID)
    with pytest.raises(error, match=re.escape(message)):
        encoder(*args, **kwargs)
    with torch.no_grad():
        expected = tower(ROWS, grid_thw=torch.tensor(GRID))
    assert distance(encoder(ROWS, grid_thw=GRID), expected) < 1e-5


@pytest.mark.parametrize("name", ["cu_seqlens", "num_items_in_batch", "cache_position"])
@pytest.mark.parametrize("trained", [False, True])
def test_tensors_that_graphs_do_not_take_reach_a_tower_that_takes_them(encoder, tower, name, trained):
    """Those that the graph computes, which models of transformers hand on, and what callers give any model."""
    value = torch.tensor([0, 32], dtype=torch.int32) if name == "cu_seqlens" else torch.tensor(3)
    grid, before = torch.tensor([(1, 4, 8)]), encoder.stats.eager[f"argument {name!r}"]
    with torch.set_grad_enabled(trained):
        expected = tower.train(trained)(ROWS, grid_thw=grid).pooler_output
        output = encoder(ROWS, grid_thw=grid, **{name: value}).pooler_output
    tower.eval()
    assert distance(output, expected) < 1e-5
    assert output.requires_grad == trained
    assert encoder.stats.eager[f"argument {name!r}"] == before + (not trained)
    assert distance(encoder(ROWS, grid_thw=grid, cu_seqlens=None).pooler_output, expected) < 1e-5


def test_tensors_that_no_graph_takes_are_refused_where_nothing_else_takes_them():
    encoder, rows = attention_encoder(), torch.randn(4, 8)
    with pytest.raises(
        vg.errors.InputError, match="argument 'cu_seqlens' is computed inside the graph; leave it out of the"
    ):
        encoder(rows, lengths=[4], cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(
        vg.errors.InputError, match="argument 'bias' holds a tensor that is not declared: a graph would keep"
    ):
        encoder(rows, lengths=[4], bias=[torch.ones(1)])


def test_more_frames_than_any_budget_has_run_eager(encoder, tower):
    grid = [(7, 2, 2)]
    before = encoder.stats.eager["larger than every budget"]
    with torch.no_grad():
        expected = tower(pixels(grid), grid_thw=torch.tensor(grid))
    assert distance(encoder(pixels(grid), grid_thw=grid), expected) < 1e-5
    assert encoder.stats.eager["larger than every budget"] == before + 1


@pytest.mark.parametrize("make", [torch.tensor, numpy.array])
def test_a_grid_may_come_item_by_item(encoder, tower, make):
    with torch.no_grad():
        expected = tower(ROWS, grid_thw=torch.tensor(GRID))
    assert distance(encoder(ROWS, grid_thw=[make(item) for item in GRID]), expected) < 1e-5
    hidden = encoder(ROWS, grid_thw=[make(item) for item in GRID], output_hidden_states=True)  # by the tower itself
    assert distance(hidden, tower(ROWS, grid_thw=torch.tensor(GRID), output_hidden_states=True)) < 1e-5


@pytest.mark.parametrize("lengths", [range(2, 4), [torch.tensor(2), torch.tensor(3)], (numpy.array(2), 3)])
def test_lengths_may_be_a_range_or_come_one_by_one(lengths):
    encoder, rows = attention_encoder(), torch.randn(5, 8)
    assert torch.equal(encoder(rows, lengths=lengths), encoder(rows, lengths=[2, 3]))


def test_an_item_that_no_budget_holds_is_described_in_words():
    encoder = attention_encoder(on_miss="error")
    with pytest.raises(
        vg.errors.BudgetError,
        match=re.escape("item 0 is (1, 1, 200) and needs 1 item of 200 rows in 1 segment of at most 200"),
    ):
        encoder(torch.zeros(200, 8), lengths=[200])


def test_counts_have_their_plurals():
    encoder = attention_encoder([vg.budgets.Budget(64)])
    encoder(torch.zeros(1, 8), lengths=[1])
    assert repr(encoder) == "GraphedEncoder(Attention, 1 budget of 64..64 rows, 1 captured)"
    assert "1 call of 1 item; 1 replay of 1 active row, 98.4% padding" in encoder.report()
    encoder(torch.zeros(65, 8), lengths=[65])
    assert "2 calls of 2 items; 1 replay of 1 active row," in encoder.report()
    assert "1 eager run: larger than every budget" in encoder.report()
    with pytest.raises(
        vg.errors.LayoutError, match=re.escape("lengths describes 1 item of 1 row in all, but x has 2 rows of")
    ):
        encoder(torch.zeros(2, 8), lengths=[1])


def test_a_report_of_the_tape_speaks_of_no_kernels():
    assert (
        attention_encoder(spec=attention_spec(rows=vg.inputs.Rows("x", (8,))))
        .capture()
        .report()
        .splitlines()[1]
        .startswith("captured in ")
    )


def test_a_size_that_fits_no_budget_comes_with_what_ran():
    class Naive(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions = nn.Parameter(torch.zeros(256, 8))

        def forward(self, x):
            return x + self.positions

    encoder = vg.GraphedEncoder(Naive(), [512], vg.BufferSpec("x", vg.Lengths()), backend="tape")
    ran = r"varlen_graphs ran the module with rows \[\d+, 8\], items \d+, for a capture: graphs run at such sizes"
    line = r"at .*test_errors.py:\d+, in forward: return x \+ self.positions"
    with pytest.raises(vg.errors.CaptureError, match=rf"(?s)size of tensor a \(\d+\).*{line}.*{ran}") as raised:
        encoder(torch.zeros(256, 8), lengths=[256])
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_a_module_of_one_item_a_call_says_so_where_a_capture_brings_more():
    class One(nn.Module):
        def forward(self, x, grid_thw):
            (item,) = grid_thw
            return x * item[0]

    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.GridTHW("grid_thw"))
    encoder = vg.GraphedEncoder(One().eval(), [64], spec, backend="tape")
    with pytest.raises(
        vg.errors.CaptureError, match=r"(?s)ValueError: too many values to unpack.*in forward: .*items \d+"
    ):
        encoder(torch.zeros(8, 8), grid_thw=torch.tensor([(1, 2, 4)]))


def test_unknown_arguments_are_refused():
    encoder = attention_encoder()
    with pytest.raises(
        vg.errors.InputError, match=re.escape("Attention has no argument 'scales'; it takes ['x', 'scale', 'le")
    ):
        encoder(torch.zeros(2, 8), lengths=[2], scales=3)
    with pytest.raises(vg.errors.InputError, match="argument 'scale' is a list, which may change"):
        encoder(torch.zeros(2, 8), lengths=[2], scale=[3])


def test_columns_need_one_integer_an_item():
    spec = attention_spec(layout=vg.Lengths(columns=(vg.layouts.Column("kind"),)))
    encoder = attention_encoder(spec=spec)
    with pytest.raises(
        vg.errors.LayoutError, match=re.escape("kind is [1, 2]: expected one integer for each of 1 item")
    ):
        encoder(torch.zeros(2, 8), lengths=[2], kind=[1, 2])
    with pytest.raises(
        vg.errors.LayoutError, match=re.escape("kind is [1.5]: expected one integer for each of 1 item")
    ):
        encoder(torch.zeros(2, 8), lengths=[2], kind=[1.5])
    for kind, message in (
        (3, "kind is 3: expected integers"),
        ([2**70], "expected one integer for each of 1 item"),
    ):
        with pytest.raises(vg.errors.LayoutError, match=re.escape(message)):
            encoder(torch.zeros(2, 8), lengths=[2], kind=kind)
    assert torch.equal(
        encoder(torch.zeros(2, 8), lengths=[2], kind=numpy.array([3])),
        encoder(torch.zeros(2, 8), lengths=[2], kind=[3]),
    )
    with pytest.raises(vg.errors.InputError, match="argument 'kind' is missing"):
        encoder(torch.zeros(2, 8), lengths=[2])


def test_rows_must_keep_the_shape_of_the_first_call():
    encoder = attention_encoder(module=Attention(8))
    encoder(torch.zeros(2, 8), lengths=[2])
    with pytest.raises(vg.errors.InputError, match=re.escape("x is [2, 9]: expected [rows, 8], as captured")):
        encoder(torch.zeros(2, 9), lengths=[2])


class Pooling(nn.Module):
    def forward(self, x, lengths):
        return x[: len(lengths)]


DECLARATIONS = {
    "a function in the place of the module": (
        lambda: vg.GraphedEncoder(lambda x: x, [64], attention_spec()), vg.errors.SpecError,
        "GraphedEncoder got a function as module and a BufferSpec as buffer_spec: expected a torch.nn.Module and a BufferSpec",
    ),
    "no declaration": (
        lambda: vg.GraphedEncoder(torch.nn.Identity(), [64], [vg.buffers.CuSeqlens()]), vg.errors.SpecError, "a list as buffer_spec",
    ),
    "no budgets": (lambda: attention_encoder(2.5), vg.errors.BudgetError, "budgets is 2.5: expected row counts or Budgets"),
    "budgets as a text": (lambda: attention_encoder("64"), vg.errors.BudgetError, "budgets is '64': expected row counts"),
    "a buffer declared twice": (
        lambda: attention_spec(buffers=[vg.buffers.CuSeqlens(), vg.buffers.CuSeqlens()]), vg.errors.SpecError,
        "['cu_seqlens'] declared more than once: expected one declaration for each argument",
    ),
    "a buffer named like the rows": (
        lambda: attention_spec(buffers=[vg.buffers.RowPositions("x")]), vg.errors.SpecError, "['x'] declared more than once",
    ),
    "frames where there are none": (
        lambda: attention_spec(buffers=[vg.buffers.CuSeqlens(per="frame")]), vg.errors.SpecError,
        "CuSeqlens(name='cu_seqlens', per='frame', queries=None) needs items with frames, which Lengths does not describe; use per='item'",
    ),
    "an unknown kind of segment": (
        lambda: attention_spec(buffers=[vg.buffers.CuSeqlens(per="word")]), vg.errors.SpecError,
        "CuSeqlens(per='word'): expected 'frame', 'item', 'clip', 'group' or a Windows",
    ),
    "an argument the module does not have": (
        lambda: attention_encoder(spec=attention_spec(buffers=[vg.buffers.CuSeqlens(), vg.buffers.MaxSeqlen(), vg.buffers.RowPositions()])),
        vg.errors.SpecError, "Attention has no argument 'position_ids', but it is declared: it takes ['x', 'cu_seqlens', 'max_",
    ),
    "rows that the module takes by position only": (
        lambda: encoder_of(PositionOnly()), vg.errors.SpecError,
        "PositionOnly has no argument 'x', but it is declared: it takes ['k'] by name; rename the declaration, or pass",
    ),
    "rows the module does not have": (
        lambda: attention_encoder(spec=attention_spec(rows="y")), vg.errors.SpecError, "Attention has no argument 'y'",
    ),
    "an unknown backend": (
        lambda: attention_encoder(backend="gpu"), vg.errors.SpecError, "backend='gpu': expected one of 'auto', 'cuda', 'tape'",
    ),
    "an unknown answer to misses": (
        lambda: attention_encoder(on_miss="skip"), vg.errors.SpecError, "on_miss='skip': expected one of 'eager', 'error'",
    ),
    "CUDA graphs on the CPU": (
        lambda: attention_encoder(backend="cuda")(torch.zeros(1, 8), lengths=[1]), vg.errors.SpecError,
        "backend='cuda' with a module on cpu: expected 'cuda' on CUDA, 'tape' on the CPU",
    ),
    "a budget no item could use": (
        lambda: vg.recipes.qwen3_vl(qwen3_vl_tower(), [vg.budgets.Budget(128, max_seqlen=3)]), vg.errors.BudgetError,
        "the shortest segment has 4 rows (merge size 2, and the ratios of the outputs); raise max_seqlen",
    ),
    "a recipe on another module": (
        lambda: vg.recipes.qwen3_vl(nn.Linear(1, 1)), vg.errors.SpecError,
        "Linear has no ['patch_embed', 'pos_embed', 'rotary_pos_emb', 'blocks', 'merger', 'spatial_merge_size']: expect",
    ),
    "a budget that the ratio of an output leaves no item for": (
        lambda: attention_encoder([vg.budgets.Budget(64, max_seqlen=3)], spec=attention_spec(outputs=vg.outputs.Rows(every=4))),
        vg.errors.BudgetError, "the shortest segment has 4 rows",
    ),
    "an unknown attention backend": (
        lambda: vg.varlen_attention(*[torch.zeros(1, 1, 8)] * 3, torch.zeros(2, dtype=torch.int32), 1, backend="flash"),
        vg.errors.InputError, "attention backend 'flash': expected one of ('auto', 'triton', 'hopper', 'torch', 'reference')",
    ),
    "a host buffer without a dimension": (
        lambda: vg.buffers.HostBuffer("x", torch.tensor, (), torch.int64), vg.errors.SpecError, "expected at least one dimension",
    ),
    "an output of another extent": (
        lambda: attention_encoder(spec=attention_spec(outputs=vg.outputs.Items()))(torch.zeros(1, 8), lengths=[1]), vg.errors.SpecError,
        "an output of shape [32, 8] is declared as Items(rows=1, rows_dim=0): expected [1, ...] at Budget(rows=32, items",
    ),
    "an output without a dimension": (
        lambda: first_call(torch.sum), vg.errors.SpecError,
        "an output of shape [] is declared as Rows(every=1, rows_dim=0, prefix=None): expected a dimension of rows or",
    ),
    "an output of several tensors in one": (
        lambda: first_call(lambda x: torch.nested.nested_tensor([x])), vg.errors.SpecError,
        "output is a sparse or nested tensor: expected a dense one; try output.to_dense()",
    ),
    "an output of a meta tensor": (
        lambda: first_call(lambda x: x.to("meta")), vg.errors.SpecError, "output is a meta tensor: expected one with values",
    ),
    "torch.cond": (
        lambda: first_call(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))), vg.errors.CaptureError,
        "torch.cond reads its predicate on the host",
    ),
    "a host buffer of a size that budgets do not have": (
        lambda: vg.buffers.HostBuffer("x", torch.tensor, ("row",), torch.int64), vg.errors.SpecError,
        "HostBuffer('x', shape=('row',)): expected at least one dimension, such as ('items',), and each to be an integer or one of ('rows', 'items', 'segments', 'segments + 1')",
    ),
    "a host buffer whose shape is a name": (
        lambda: vg.buffers.HostBuffer("x", torch.tensor, "rows", torch.int64), vg.errors.SpecError, "HostBuffer('x', shape='rows'): exp",
    ),
    "a host buffer of a dtype by its name": (
        lambda: vg.buffers.HostBuffer("x", torch.tensor, ("rows",), "int64"), vg.errors.SpecError,
        "HostBuffer('x', dtype='int64'): expected a torch.dtype, such as torch.float32",
    ),
    "outputs by their name": (
        lambda: attention_spec(outputs="rows"), vg.errors.SpecError,
        "'rows' does not declare an output: expected an instance of Rows, Items, Groups, Entries or FrameRows of vg.outputs, such as",
    ),
    "outputs by their class": (
        lambda: attention_spec(outputs={"x": (vg.outputs.Items(), vg.outputs.Rows)}), vg.errors.SpecError,
        "<class 'varlen_graphs.outputs.entries.Rows'> does not declare an output",
    ),
    "no outputs": (lambda: attention_spec(outputs=None), vg.errors.SpecError, "None does not declare an output: expected an"),
    "a layout by its name": (
        lambda: attention_spec(layout="lengths"), vg.errors.SpecError,
        "layout='lengths': expected a declaration of the argument that describes the items, such as Lengths('lengths') or GridTHW('g",
    ),
    "a layout by its class": (lambda: attention_spec(layout=vg.Lengths), vg.errors.SpecError, "layout=<class 'varlen_graphs.layouts.l"),
    "a layout without a name": (
        lambda: attention_spec(layout=vg.GridTHW(2)), vg.errors.SpecError, "GridTHW(name=2): expected the name of an argument",
    ),
    "a merge size that is no integer": (
        lambda: vg.GridTHW("grid_thw", merge=2.0), vg.errors.SpecError, "GridTHW(merge=2.0): expected an integer of at least 1",
    ),
    "columns without a comma": (
        lambda: vg.Lengths("lengths", columns=(vg.layouts.Column("kind"))), vg.errors.SpecError,
        "default=None): expected a tuple of columns, such as (Column('kind'),); mind the comma",
    ),
    "columns of a grid without a comma": (
        lambda: vg.GridTHW(columns=(vg.layouts.Column("kind"))), vg.errors.SpecError, "expected a tuple of columns, such as (Column('k",
    ),
    "columns of a mask by their names": (
        lambda: vg.Mask(columns=("kind",)), vg.errors.SpecError, "columns=('kind',): expected a tuple of columns, such as",
    ),
    "a column with a pad that is no integer": (
        lambda: vg.layouts.Column("kind", pad=0.5), vg.errors.SpecError, "Column(pad=0.5): expected an integer",
    ),
    "a buffer without a list": (
        lambda: attention_spec(buffers=vg.buffers.CuSeqlens()), vg.errors.SpecError,
        "buffers=CuSeqlens(name='cu_seqlens', per='item', queries=None): expected a list of declarations, such as [vg.buffers.CuSeq",
    ),
    "a buffer by its name": (
        lambda: attention_spec(buffers=["cu_seqlens"]), vg.errors.SpecError, "buffers=['cu_seqlens']: expected a list of declar",
    ),
    "a buffer by its class": (
        lambda: attention_spec(buffers=[vg.buffers.CuSeqlens]), vg.errors.SpecError, "buffers=[<class 'varlen_graphs.buffers.cu_seqlens.C",
    ),
    "rows whose shape is a size": (
        lambda: vg.inputs.Rows("x", shape=8), vg.errors.SpecError, "expected shape to be that of one row, such as (1176,), or N",
    ),
    "rows of any size": (lambda: vg.inputs.Rows("x", shape=(None,)), vg.errors.SpecError, "expected shape to be that of one row"),
    "rows of a dtype by its name": (
        lambda: vg.inputs.Rows("x", dtype="int64"), vg.errors.SpecError, "expected dtype to be a torch.dtype, such as torch.int64",
    ),
    "a ratio that is no integer": (
        lambda: vg.outputs.Rows(every=2.0), vg.errors.SpecError, "Rows(every=2.0, rows_dim=0, prefix=None): expected an integer of at least 1, and",
    ),
    "a host buffer of another shape": (
        lambda: attention_encoder(
            spec=attention_spec(buffers=[
                vg.buffers.HostBuffer("cu_seqlens", lambda layout: torch.zeros(3, 3), ("items",), torch.int32), vg.buffers.MaxSeqlen(),
            ])
        )(torch.zeros(1, 8), lengths=[1]), vg.errors.SpecError,
        "the function of HostBuffer 'cu_seqlens' returned [3, 3] for 3 items of 68 rows: expected a CPU tensor [3], ['it",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "error", "message"), DECLARATIONS.values(), ids=DECLARATIONS.keys())
def test_bad_declarations_raise_named_errors(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()


@pytest.mark.parametrize("shape", [[8], torch.Size([8])])
def test_the_shape_of_rows_may_be_any_sequence(shape):
    encoder = attention_encoder(spec=attention_spec(rows=vg.inputs.Rows("x", shape=shape)))
    assert encoder(torch.zeros(3, 8), lengths=[3]).shape == (3, 8)
    with pytest.raises(vg.errors.InputError, match=re.escape("x is [3, 9]: expected [rows, 8]")):
        encoder(torch.zeros(3, 9), lengths=[3])


def test_rows_an_output_ratio_cuts_are_refused():
    class Merging(nn.Module):
        def forward(self, x):
            return x.unflatten(0, (-1, 4)).sum(1)

    spec = vg.BufferSpec("x", vg.Lengths(), outputs=vg.outputs.Rows(every=4))
    encoder = vg.GraphedEncoder(Merging(), [128], spec, backend="tape")
    with pytest.raises(vg.errors.LayoutError, match=re.escape("lengths[1] has 6 rows: expected a multiple of 4")):
        encoder(torch.ones(10, 2), lengths=[4, 6])
    assert encoder(torch.ones(12, 2), lengths=[4, 8]).tolist() == [[4.0, 4.0]] * 3
    assert encoder.stats.replays.total() == 1


def test_integer_rows_need_a_declared_dtype_and_keep_to_it():
    class Embedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(1000, 4)

        def forward(self, ids):
            return self.table(ids)

    ids = torch.tensor([300, 999])
    plain = vg.GraphedEncoder(Embedding(), [128], vg.BufferSpec("ids", vg.Lengths()), backend="tape")
    with pytest.raises(vg.errors.InputError, match=re.escape("declare rows=vg.inputs.Rows('ids', dtype=torch.int64)")):
        plain(ids, lengths=[2])
    spec = vg.BufferSpec(vg.inputs.Rows("ids", shape=(), dtype=torch.int64), vg.Lengths())
    encoder = vg.GraphedEncoder(Embedding(), [128], spec, backend="tape").capture()
    assert torch.equal(encoder(ids, lengths=[2]), encoder.module.table(ids))
    for other in (ids.int(), ids.to(torch.uint8), ids.float()):
        with pytest.raises(
            vg.errors.InputError, match=r"ids is torch.\w+: expected torch.int64; floating rows are cast, others"
        ):
            encoder(other, lengths=[2])


def test_missing_arguments_without_a_default_are_named():
    class Picky(nn.Module):
        def forward(self, x, how):
            return x * how

    encoder = vg.GraphedEncoder(Picky(), [128], vg.BufferSpec("x", vg.Lengths()), backend="tape")
    with pytest.raises(
        vg.errors.InputError,
        match=re.escape("arguments ['how'] are missing: Picky has no default for them; pass them if"),
    ):
        encoder(torch.ones(2, 1), lengths=[2])


@pytest.mark.parametrize(
    ("count", "values"),
    [
        (lambda x, lengths: x.shape[0], "[32] and [48]"),
        (lambda x, lengths: len(lengths), "[1] and [3]"),
        (lambda x, lengths: x.shape[0] if x.shape[0] > 128 else 0, "[0] and [256]"),
    ],
)
@pytest.mark.parametrize("budgets", [[128, 256], [256]])
def test_python_values_that_depend_on_the_items_are_refused(count, values, budgets):
    class Counting(nn.Module):
        def forward(self, x, lengths):
            return {"x": x, "count": count(x, lengths)}

    encoder = vg.GraphedEncoder(
        Counting(), [vg.budgets.Budget(n, 8) for n in budgets], vg.BufferSpec("x", vg.Lengths()), backend="tape"
    )
    with pytest.raises(vg.errors.SpecError, match=re.escape(f"Python values that depend on the items, {values}")):
        encoder(torch.ones(2, 1), lengths=[2])


def test_a_capture_that_fails_names_the_line_and_the_encoder_can_run_eager():
    class Reading(Attention):
        def forward(self, x, cu_seqlens, max_seqlen):
            return super().forward(x, cu_seqlens, max_seqlen) * cu_seqlens.max().item()

    encoder, rows = attention_encoder(module=Reading()), torch.randn(6, 8)
    for _ in range(2):
        with pytest.raises(
            vg.errors.CaptureError, match=r"(?s)could not be captured: Tensor.item reads.*test_\w+\.py.*\.item\(\)"
        ):
            encoder(rows, lengths=[6])
    assert encoder.eager(rows, lengths=[6]).isfinite().all()
    other = attention_encoder(pool=encoder.pool)
    assert distance(other(rows, lengths=[6]), other.eager(rows, lengths=[6])) < 1e-6


def test_a_capture_that_gives_something_else_than_the_run_before_it():
    class Fickle(torch.nn.Linear):
        def forward(self, x):
            return [super().forward(x)] * (1 if next(runs) == runs_before_the_capture else 2)

    runs, runs_before_the_capture = count(), 5  # alone, at capacity, two probes, and one that is watched
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(4,)), vg.Lengths())
    encoder = vg.GraphedEncoder(Fickle(4, 4), [64], spec, backend="tape")
    with pytest.raises(vg.errors.CaptureError, match=r"the capture returned 1 tensor .* the run before it 2 with"):
        encoder.capture()
