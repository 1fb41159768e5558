"""A module with tensors of all kinds beside its rows, for packed rows, padded batches, and batches to pack."""

import torch
from torch import nn

import varlen_graphs as vg
from tests.support.leftovers import keep_leftovers
from tests.support.towers import distance, equal_bits


class Mixed(nn.Module):
    """Token ids, types of tokens, a time and a class an item, a scale and a prompt a call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.types, self.classes = nn.Embedding(50, 8), nn.Embedding(3, 8), nn.Embedding(5, 8)
        self.time, self.linear = nn.Linear(1, 8), nn.Linear(8, 8)

    def forward(self, ids, kinds, t, label, scale, prompt):
        x = self.words(ids) + self.types(kinds)
        each = self.time(t[..., None]) + self.classes(label)
        x = x + (each[:, None] if ids.dim() == 2 else each)
        return self.linear(x) * scale + prompt.mean(0)


def inputs_of(per_row):
    return [
        vg.inputs.PerRow("kinds", dtype=torch.int64, default=1, pad=2),
        vg.inputs.PerItem("t", per_row=per_row),
        vg.inputs.PerItem("label", dtype=torch.int64, pad=4, per_row=per_row),
        vg.inputs.PerCall("scale"),
        vg.inputs.PerCall("prompt", (4, 8)),
    ]


IDS = {"name": "ids", "shape": (), "dtype": torch.int64, "pad": 49}
SPECS = {
    "packed": vg.BufferSpec(vg.inputs.Rows(**IDS), vg.Lengths(), inputs=inputs_of(True)),
    "padded": vg.BufferSpec(vg.inputs.Rows(**IDS), vg.Lengths(padded=True), inputs=inputs_of(False)),
    "batch to pack": vg.BufferSpec(vg.inputs.Rows(**IDS, padded_by="mask"), vg.Lengths(), inputs=inputs_of(True)),
}
BUDGETS = {
    "packed": [vg.budgets.Budget(32, items=3), vg.budgets.Budget(96, items=4)],
    "padded": [vg.budgets.Budget.padded(2, 16), vg.budgets.Budget.padded(3, 32)],
    "batch to pack": [vg.budgets.Budget(32, items=3), vg.budgets.Budget(96, items=4)],
}


def call_of(kind, lengths, seed=0, device="cpu", with_kinds=True, numbers=False):
    """Return the arguments of a call; `numbers` brings what belongs to items and calls as numbers on the host."""
    generator = torch.Generator().manual_seed(seed)
    items, longest = len(lengths), max(lengths)
    size = (sum(lengths),) if kind == "packed" else (items, longest)
    call = {
        "ids": torch.randint(50, size, generator=generator),
        "t": torch.rand(items, generator=generator),
        "label": torch.randint(5, (items,), generator=generator),
        "scale": torch.rand((), generator=generator),
        "prompt": torch.randn(4, 8, generator=generator),
    }
    if with_kinds:
        call["kinds"] = torch.randint(3, size, generator=generator)
    if numbers:
        call |= {name: call[name].tolist() for name in ("t", "label", "scale")}
    if kind == "batch to pack":
        call["mask"] = torch.arange(longest) < torch.tensor(lengths)[:, None]
    call = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    return call | {"lengths": list(lengths)}


def expected(module, kind, call, lengths):
    """Return what the module gives, plainly; zeros past the end of an item of a batch."""
    device = call["ids"].device
    lengths = torch.tensor(lengths, device=device)
    t = torch.as_tensor(call["t"], device=device)
    label = torch.as_tensor(call["label"], device=device)
    if kind == "packed":
        t, label = t.repeat_interleave(lengths), label.repeat_interleave(lengths)
    kinds = call.get("kinds", torch.ones_like(call["ids"]))
    output = module(call["ids"], kinds, t, label, torch.as_tensor(call["scale"], device=device), call["prompt"])
    if kind != "packed":
        real = torch.arange(call["ids"].shape[1], device=device) < lengths[:, None]
        output = torch.where(real[..., None], output, 0.0)
    return output


def check_inputs_contract(encoder, kind, device, tolerance=1e-5):
    """Check the padding contract: large, small and larger calls over NaN, and over what a large call left behind."""
    encoder.capture()
    large = call_of(kind, [30, 28, 25], 100, device)
    for seed, lengths in enumerate(([20, 12, 30], [3], [1, 1], [16, 16], [30, 2, 7])):
        call = call_of(kind, lengths, seed, device)
        encoder.poison()
        over_nan = encoder(**call)
        encoder(**large)
        keep_leftovers(encoder)
        assert equal_bits(over_nan, encoder(**call)), lengths
        assert distance(over_nan, expected(encoder.module, kind, call, lengths)) <= tolerance, lengths
    assert not encoder.stats.eager
