"""An error about a declaration names the one that works: each is tried here, and then the one it names."""

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.shrinking import half

DIM = 8
ROWS = vg.inputs.Rows("x", (DIM,))
PADDED = vg.budgets.Budget.padded(2, 16)


class Scaled(nn.Linear):
    def forward(self, x, t=1.0):
        return super().forward(x) * (t.view(-1, *[1] * (x.dim() - 1)) if isinstance(t, torch.Tensor) else t)


class Prefixed(nn.Linear):
    def forward(self, x, prefix_index=None):
        if prefix_index is None:
            return (
                torch.cat([self.bias.expand(len(x), 1, -1), x], 1) if x.dim() == 3 else torch.cat([self.bias[None], x])
            )
        return torch.cat([x, self.bias[None]])[prefix_index]


class Strided(nn.Conv1d):
    def forward(self, x):
        return super().forward(x.mT).mT


class Averaged(nn.Linear):
    def forward(self, x):
        return super().forward(x).unflatten(0, (-1, 4)).mean(1)


class EveryThird(nn.Linear):
    def forward(self, x):
        return super().forward(x[:, ::3])


def third(rows):
    return (rows + 2) // 3


def linear(kind=nn.Linear):
    return kind(DIM, DIM)


def strided():
    return Strided(DIM, DIM, 3, 2, 1)


PACKED_CALL = {"x": torch.randn(9, DIM), "lengths": [5, 4]}
PADDED_CALL = {"x": torch.randn(2, 12, DIM), "lengths": [12, 7]}
PADDED_CALL["x"][1, 7:] = 0  # which a convolution reads
FOURS = {"x": torch.randn(12, DIM), "lengths": [8, 4]}

CASES = {
    "a padded batch with packed rows": (
        lambda: linear(Scaled), {"x": torch.randn(2, 5, DIM), "lengths": [5, 3]}, vg.BufferSpec("x", vg.Lengths()),
        r"for a padded batch declare Mask or Lengths\(padded=True\)", vg.BufferSpec("x", vg.Lengths(padded=True)),
    ),
    "a batch with packed rows of known shape": (
        lambda: linear(Scaled), {"x": torch.randn(2, 5, DIM), "lengths": [5, 3]}, vg.BufferSpec(ROWS, vg.Lengths()),
        r"for batches declare Mask or Lengths\(padded=True\)", vg.BufferSpec(ROWS, vg.Lengths(padded=True)),
    ),
    "a batch of images with packed rows": (
        lambda: nn.Sequential(nn.Flatten(1), nn.Linear(48, 8)), {"input": torch.randn(2, 3, 4, 4)},
        vg.BufferSpec(vg.inputs.Rows("input", (3,)), vg.Batch()),
        r"input is \[2, 3, 4, 4\]: expected \[batch, 3\]", vg.BufferSpec("input", vg.Batch()),
    ),
    "a class token before packed rows": (
        lambda: linear(Prefixed), PACKED_CALL, vg.BufferSpec(ROWS, vg.Lengths()),
        r"Rows\(prefix='kept'\) with prefix=1 in the layout",
        vg.BufferSpec(ROWS, vg.Lengths(prefix=1), [vg.buffers.PrefixIndex()], vg.outputs.Rows(prefix="kept")),
    ),
    "a class token before a padded batch": (
        lambda: linear(Prefixed), PADDED_CALL, vg.BufferSpec(ROWS, vg.Lengths(padded=True)),
        r"Rows\(prefix='kept'\) with prefix=1 in the layout",
        vg.BufferSpec(ROWS, vg.Lengths(prefix=1, padded=True), outputs=vg.outputs.Rows(prefix="kept")),
    ),
    "a ratio": (
        lambda: linear(Averaged), FOURS, vg.BufferSpec(ROWS, vg.Lengths()),
        r"declare it as Rows\(every=4\)", vg.BufferSpec(ROWS, vg.Lengths(), outputs=vg.outputs.Rows(every=4)),
    ),
    "a ratio that items need not have": (
        strided, PADDED_CALL, vg.BufferSpec(ROWS, vg.Lengths(padded=True), outputs=vg.outputs.Rows(every=2)),
        r"lengths\[1\] has 7 rows: expected a multiple of 2, .* or declare Entries\(...\) with a function of the rows",
        vg.BufferSpec(ROWS, vg.Lengths(padded=True), outputs=vg.outputs.Entries(half)),
    ),
    "a stride in a padded batch": (
        strided, PADDED_CALL, vg.BufferSpec(ROWS, vg.Lengths(padded=True)),
        r"Entries\(of_item\) with a function of the rows that gives 8 for 16",
        vg.BufferSpec(ROWS, vg.Lengths(padded=True), outputs=vg.outputs.Entries(half)),
    ),
    "a stride that divides no budget": (
        lambda: linear(EveryThird), PADDED_CALL, vg.BufferSpec(ROWS, vg.Lengths(padded=True)),
        r"declare it as Items\(\), or Entries\(of_item\) with a function of the rows that gives 6 for 16",
        vg.BufferSpec(ROWS, vg.Lengths(padded=True), outputs=vg.outputs.Entries(third)),
    ),
    "a tensor an item": (
        lambda: linear(Scaled), PADDED_CALL | {"t": torch.rand(2)}, vg.BufferSpec(ROWS, vg.Lengths(padded=True)),
        r"inputs=\[vg.inputs.PerItem\('t', \(\)\)\]", vg.BufferSpec(ROWS, vg.Lengths(padded=True), inputs=[vg.inputs.PerItem("t", ())]),
    ),
    "a tensor an item of a batch": (
        lambda: linear(Scaled), {"x": torch.randn(3, DIM), "t": torch.rand(3)}, vg.BufferSpec(ROWS, vg.Batch()),
        r"inputs=\[vg.inputs.PerItem\('t', \(\)\)\]", vg.BufferSpec(ROWS, vg.Batch(), inputs=[vg.inputs.PerItem("t", ())]),
    ),
    "a tensor a call": (
        lambda: linear(Scaled), PACKED_CALL | {"t": torch.tensor(0.5)}, vg.BufferSpec(ROWS, vg.Lengths()),
        r"inputs=\[vg.inputs.PerCall\('t', \(\)\)\]", vg.BufferSpec(ROWS, vg.Lengths(), inputs=[vg.inputs.PerCall("t", ())]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_declaration_that_the_error_names_works(case):
    make, call, wrong, message, right = CASES[case]
    torch.manual_seed(0)
    module = make().eval().requires_grad_(False)
    with pytest.raises((vg.errors.InputError, vg.errors.LayoutError, vg.errors.SpecError), match=message):
        encoder_of(module, wrong)(**call)
    encoder = encoder_of(module, right)
    torch.testing.assert_close(encoder(**call), encoder.eager(**call))
    assert not encoder.stats.eager


class OfData(nn.Linear):
    """Returns as many rows as its values say."""

    def forward(self, x):
        x = super().forward(x)
        return x[x[:, 0] > 0]


class OfDataOnTheHost(nn.Linear):
    def forward(self, x):
        count = int((super().forward(x)[:, 0] > 0).sum())
        return x[:count]


class Three(nn.Linear):
    def forward(self, x):
        return super().forward(x)[:3]


class Pooled(nn.Linear):
    def forward(self, x, cu_seqlens):
        return super().forward(x)[cu_seqlens[:-1]]


@pytest.mark.parametrize("outputs", [vg.outputs.Rows(), vg.outputs.Items()])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OfData, r"shape of aten.index.Tensor's result depends on data\n  at .*in forward: return x\[x\[:, 0\] > 0\]"),
        (OfDataOnTheHost, r"reads a tensor on the host\n  at .*count = int\("),
        (Three, r"it has 3 rows whatever the rows and items are: return one for each row or item"),
    ],
)
def test_sizes_that_follow_from_no_declaration_are_named_as_such(kind, message, outputs):
    encoder = encoder_of(linear(kind).eval(), vg.BufferSpec(ROWS, vg.Lengths(), outputs=outputs))
    with pytest.raises((vg.errors.CaptureError, vg.errors.SpecError), match=message) as error:
        encoder(**PACKED_CALL)
    assert "declare it as Items(rows=" not in str(error.value)


def test_what_is_suggested_fits_any_number_of_items():
    """One for one item of 32 rows is also a ratio of 32."""
    spec = vg.BufferSpec(ROWS, vg.Lengths(), [vg.buffers.CuSeqlens("cu_seqlens")])
    with pytest.raises(vg.errors.SpecError, match=r"; declare it as Items\(rows=1\), or Entries"):
        encoder_of(linear(Pooled).eval(), spec)(**PACKED_CALL)


def encoder_of(module, spec):
    budgets = [PADDED] if spec.layout.padded else [4] if spec.layout.one_row else [32]
    return vg.GraphedEncoder(module, budgets, spec, backend="tape", verify=vg.options.Verify(strict=True))


def test_numbers_that_change_are_tensors_a_call():
    encoder = encoder_of(linear(Scaled).eval().requires_grad_(False), vg.BufferSpec(ROWS, vg.Lengths()))
    with pytest.warns(UserWarning, match=r"declare what changes from call to call by inputs=\[vg.inputs.PerCall"):
        [encoder(**PACKED_CALL, t=step / 10) for step in range(9)]
    declared = vg.BufferSpec(ROWS, vg.Lengths(), inputs=[vg.inputs.PerCall("t")])
    encoder = encoder_of(encoder.module, declared)
    for step in range(9):
        torch.testing.assert_close(encoder(**PACKED_CALL, t=step / 10), encoder.module(PACKED_CALL["x"], step / 10))
    assert len(encoder.executor.store.sets) == 1
