"""What calls leave out must mean what the module itself makes of that; also many items, and values of outputs."""

import pytest
import torch
from torch import nn

import varlen_graphs as vg

REFUSED = "its budget failed verification"


class Typed(nn.Module):
    """Rows with kinds, or without."""

    def __init__(self, given="kinds", missing=None):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.embed, self.missing = nn.Linear(8, 8), nn.Embedding(64, 8), missing

    def forward(self, x, kinds=None):
        if kinds is None and self.missing is None:
            return self.linear(x)
        kinds = torch.full((len(x),), self.missing, device=x.device) if kinds is None else kinds
        return self.linear(x) + self.embed(kinds)


def typed_encoder(module):
    kinds = vg.inputs.PerRow("kinds", dtype=torch.int64, default=0)
    return vg.GraphedEncoder(module, [64], vg.BufferSpec("x", vg.Lengths("lengths"), inputs=[kinds]), backend="tape")


def test_an_input_whose_default_the_module_understands_otherwise_is_found():
    module = Typed().eval()
    encoder, rows, kinds = typed_encoder(module), torch.randn(10, 8), torch.arange(10)
    with pytest.warns(
        UserWarning, match="wrong for calls that leave 'kinds' out: output of item .* from the module itself"
    ):
        output = encoder(rows, lengths=[10])
    assert torch.equal(output, module(rows))
    assert encoder.stats.eager == {REFUSED: 1}
    torch.testing.assert_close(encoder(rows, lengths=[10], kinds=kinds), module(rows, kinds))


def test_a_default_that_means_what_the_module_makes_of_nothing_is_right():
    module = Typed(missing=0).eval()
    encoder, rows = typed_encoder(module), torch.randn(10, 8)
    torch.testing.assert_close(encoder(rows, lengths=[10]), module(rows))
    assert not encoder.stats.eager


class Pool(nn.Module):
    """The mean of real rows, or the last row where there is no mask."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x, mask=None):
        y = self.linear(x)
        if mask is None:
            return {"pooled": y[:, -1]}
        weights = mask.to(y.dtype)[..., None]
        return {"pooled": (y * weights).sum(1) / weights.sum(1)}


def masked_encoder(module):
    spec = vg.BufferSpec("x", vg.Mask("mask", optional=True), outputs=vg.outputs.Fields(pooled=vg.outputs.Items()))
    return vg.GraphedEncoder(module, vg.budgets.PaddedLadder(batch=4, length=32), spec, backend="tape")


def test_a_mask_that_may_be_left_out_is_tried_without():
    module, rows = Pool().eval(), torch.randn(3, 10, 8)
    encoder = masked_encoder(module)
    with pytest.warns(UserWarning, match="that leave 'mask' out"):
        assert torch.equal(encoder(rows)["pooled"], module(rows)["pooled"])
    mask = torch.arange(10) < torch.tensor([[10], [4], [7]])
    torch.testing.assert_close(encoder(rows, mask=mask)["pooled"], module(rows, mask)["pooled"])


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x, scale=None):
        return self.linear(x) * (2.0 if scale is None else scale)


def scaled(module, x, scale):
    return module.linear(x) * scale


@pytest.mark.parametrize("forward", [None, scaled], ids=["the module itself", "a function in its place"])
def test_an_input_of_all_calls_is_tried_without(forward):
    module, rows = Scaled().eval(), torch.randn(10, 8)
    spec = vg.BufferSpec("x", vg.Lengths("lengths"), inputs=[vg.inputs.PerCall("scale", default=1.0)])
    encoder = vg.GraphedEncoder(module, [64], spec, forward=forward, backend="tape")
    if forward is not None:  # the module takes no lengths, so it cannot be asked
        assert torch.equal(encoder(rows, lengths=[10]), module(rows, 1.0))
        return
    with pytest.warns(UserWarning, match="that leave 'scale' out"):
        assert torch.equal(encoder(rows, lengths=[10]), module(rows))


@pytest.mark.parametrize("given", [{"kinds": None}, {}], ids=["None", "nothing"])
def test_none_is_as_good_as_nothing(given):
    module, rows, kinds = Typed().eval(), torch.randn(10, 8), torch.arange(10)
    encoder = typed_encoder(module)
    with pytest.warns(UserWarning, match="that leave 'kinds' out"):
        encoder(rows, lengths=[10], kinds=kinds)
    for _ in range(2):
        assert torch.equal(encoder(rows, lengths=[10], **given), module(rows))
    masked, batch = Pool().eval(), torch.randn(3, 10, 8)
    encoder = masked_encoder(masked)
    with pytest.warns(UserWarning, match="that leave 'mask' out"):
        encoder(batch, mask=None)
    assert torch.equal(encoder(batch, None)["pooled"], masked(batch)["pooled"])


class Needs(Pool):
    def forward(self, x, mask):  # None, but never nothing
        return super().forward(x, mask)


def test_an_argument_that_the_module_needs_is_tried_as_none():
    module, rows = Needs().eval(), torch.randn(3, 10, 8)
    encoder = masked_encoder(module)
    with pytest.warns(UserWarning, match="that leave 'mask' out"):
        assert torch.equal(encoder(rows, mask=None)["pooled"], module(rows, None)["pooled"])


class Multiplied(Typed):
    def forward(self, x, kinds=None, factor=3):  # None, a static argument, is not left out
        return super().forward(x, kinds) * (factor or 1)


def test_only_arguments_that_calls_may_leave_out_are_named():
    module, rows, kinds = Multiplied().eval(), torch.randn(10, 8), torch.arange(10)
    with pytest.warns(UserWarning, match="that leave 'kinds' out"):
        output = typed_encoder(module)(rows, lengths=[10], kinds=kinds, factor=None)
    torch.testing.assert_close(output, module(rows, kinds, None))


class Doubled(Scaled):
    def forward(self, x, scale=2.0):
        return super().forward(x, scale)


def test_none_is_refused_where_the_module_has_another_default():
    spec = vg.BufferSpec("x", vg.Lengths("lengths"), inputs=[vg.inputs.PerCall("scale", default=2.0)])
    module, rows = Doubled().eval(), torch.randn(10, 8)
    encoder = vg.GraphedEncoder(module, [64], spec, backend="tape")
    with pytest.raises(vg.errors.InputError, match="'scale' is None, but Doubled has another default for it"):
        encoder(rows, lengths=[10], scale=None)
    torch.testing.assert_close(encoder(rows, lengths=[10]), module(rows))


class Crowd(nn.Module):
    """Items are treated apart until there are many."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.linear, self.embed = kind, nn.Linear(8, 8), nn.Embedding(64, 8)

    def forward(self, x, lengths):
        y = self.linear(x)
        if self.kind == "centred beyond 10 items":
            return y - y.mean(0) if lengths.numel() > 10 else y
        return y + self.embed(torch.arange(len(x), device=x.device) // 1024)


@pytest.mark.parametrize("kind", ["centred beyond 10 items", "embedded by 1024 rows"])
def test_what_begins_with_many_items_or_rows_is_found(kind):
    module = Crowd(kind).eval()
    encoder = vg.GraphedEncoder(module, [64, 128, 256], vg.BufferSpec("x", vg.Lengths("lengths")), backend="tape")
    lengths = [10] * 120 if "rows" in kind else [10] * 12
    rows = torch.randn(sum(lengths), 8)
    with pytest.warns(UserWarning, match="graphs failed verification|could not be captured"):
        output = encoder(rows, lengths=lengths)
    torch.testing.assert_close(output, module(rows, torch.tensor(lengths)))
    assert sum(encoder.stats.eager.values()) == 1


@pytest.mark.parametrize("most", [6, 7, 12, 18, 20, 24, 45, 60])
def test_a_number_of_items_from_which_a_module_does_something_else_is_found(most):
    class Counts(Pool):
        def forward(self, x, cu_seqlens):
            return self.linear(x) * (2 if len(cu_seqlens) > most else 1)

    module = Counts().eval()
    spec = vg.BufferSpec("x", vg.Lengths("lengths"), buffers=[vg.buffers.CuSeqlens()])
    encoder = vg.GraphedEncoder(module, [64, 128], spec, backend="tape")
    lengths = [1] * (most + 2)
    rows = torch.randn(len(lengths), 8)
    with pytest.warns(UserWarning, match="graphs failed verification"):
        output = encoder(rows, lengths=lengths)
    torch.testing.assert_close(output, module(rows, torch.arange(len(lengths) + 1).int()))


class Paged(nn.Module):
    """Each 8 items have an embedding, told by a buffer."""

    def __init__(self):
        super().__init__()
        self.linear, self.embed = nn.Linear(8, 8), nn.Embedding(64, 8)

    def forward(self, x, row_item):
        return self.linear(x) + self.embed(row_item // 8)


def test_what_counts_items_is_found_where_the_module_cannot_be_asked():
    spec = vg.BufferSpec(
        "x", vg.Lengths("lengths"), buffers=[vg.buffers.DeviceBuffer("row_item", lambda table: table.row_item)]
    )
    module, rows = Paged().eval(), torch.randn(120, 8)
    encoder = vg.GraphedEncoder(module, [64, 128, 256], spec, backend="tape")
    with pytest.warns(UserWarning, match="The items of a call act on each other"):
        output = encoder(rows, lengths=[10] * 12)
    torch.testing.assert_close(output, module(rows, torch.arange(12).repeat_interleave(10)))


class Flagged(nn.Module):
    """Each row is treated as a flag, or an integer, of any row says."""

    def __init__(self, rule):
        super().__init__()
        torch.manual_seed(0)
        self.rule, self.linear = rule, nn.Linear(64, 64)

    def forward(self, x, given):
        return self.linear(x) * torch.where(self.rule(given), 2.0, 1.0)


RULES = {
    "any": (torch.bool, torch.any),
    "all": (torch.bool, torch.all),
    "integers above 0": (torch.int64, lambda given: (given > 0).any()),
    "integers above 30": (torch.int64, lambda given: (given > 30).any()),
    "integers that are all above 30": (torch.int64, lambda given: (given > 30).all()),
    "the largest byte": (torch.uint8, lambda given: given.max() > 100),
    "negative numbers": (torch.float32, lambda given: (given < 0).any()),
}


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_items_that_act_on_each_other_through_other_tensors_are_found(rule, lazily):
    dtype, function = RULES[rule]
    module = Flagged(function).eval().requires_grad_(False)
    spec = vg.BufferSpec(vg.inputs.Rows("x", (64,)), vg.Lengths(), inputs=[vg.inputs.PerRow("given", dtype=dtype)])
    encoder = vg.GraphedEncoder(module, [64, 128], spec, backend="tape")
    first = {"x": torch.randn(60, 64), "lengths": [60], "given": torch.zeros(60, dtype=dtype)}
    with pytest.warns(UserWarning, match="graphs failed verification"):
        encoder(**first) if lazily else encoder.capture()
    for lengths in ([60], [60, 60], [60, 60, 60], [120, 10]):
        rows = torch.randn(sum(lengths), 64)
        given = torch.where(torch.arange(len(rows)) < 5, -1 if dtype == torch.float32 else 60, 0).to(dtype)
        torch.testing.assert_close(encoder(rows, lengths=lengths, given=given), module(rows, given))


def test_a_split_that_was_wrong_once_is_never_trusted_again():
    module = Flagged(lambda given: (given == 17).any()).eval().requires_grad_(False)  # which no check tries
    spec = vg.BufferSpec(
        vg.inputs.Rows("x", (64,)), vg.Lengths(), inputs=[vg.inputs.PerRow("given", dtype=torch.int64)]
    )
    encoder = vg.GraphedEncoder(module, [64, 128], spec, backend="tape").capture()
    for lengths in ([120, 60], [120, 10], [60, 60, 60], [100, 100, 100]):
        rows = torch.randn(sum(lengths), 64)
        given = torch.where(torch.arange(len(rows)) < 5, 17, 0)
        torch.testing.assert_close(encoder(rows, lengths=lengths, given=given), module(rows, given))


class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        return (y, y) if len(x) > 70 else [y, y]


def test_types_of_an_output_that_follow_from_the_rows_are_refused():
    encoder = vg.GraphedEncoder(Holds().eval(), [64, 128], vg.BufferSpec("x", vg.Lengths()), backend="tape")
    with pytest.raises(vg.errors.SpecError, match=r"types that depend on the budget, \['tuple'\] and \['list'\]"):
        encoder.capture({"x": torch.randn(20, 8), "lengths": [20]})


class Reports(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.linear, self.value = nn.Linear(8, 8), value

    def forward(self, x):
        return {"h": self.linear(x), "value": self.value(x)}


@pytest.mark.parametrize(
    "value",
    [lambda x: -len(x) % 8, lambda x: x * 2 if len(x) < 16 else None, lambda x: len(x) > 600],
    ids=["multiples of 8", "a tensor of few rows", "many rows"],
)
def test_python_values_that_follow_from_the_rows_are_refused_wherever_they_change(value):
    encoder = vg.GraphedEncoder(
        Reports(value).eval(), [64, 128], vg.BufferSpec("x", vg.Lengths("lengths")), backend="tape"
    )
    for _ in range(2):
        with pytest.raises(vg.errors.SpecError, match="Python values that depend on the items"):
            encoder(torch.randn(17, 8), lengths=[17])


@pytest.mark.parametrize("length", [2, 9, 17, 22, 31])
def test_a_length_that_a_module_treats_in_a_way_of_its_own_is_found(length):
    class Treats(Pool):
        def forward(self, x, lengths):
            of_row = torch.as_tensor(lengths).repeat_interleave(torch.as_tensor(lengths))
            return self.linear(x) * torch.where(of_row == length, 2, 1)[:, None]

    module, rows = Treats().eval(), torch.randn(length + 5, 8)
    spec = vg.BufferSpec("x", vg.Lengths("lengths"), declared_by="recipe")
    encoder = vg.GraphedEncoder(module, [64], spec, forward=lambda module, x: module.linear(x), backend="tape")
    with pytest.warns(UserWarning, match="graphs failed verification"):
        output = encoder(rows, lengths=[length, 5])
    torch.testing.assert_close(output, module(rows, [length, 5]))
