"""Encoders of sound."""

import torch
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

import varlen_graphs as vg
from tests.support.declared.case import Case, graphed
from tests.support.encoders import load_example
from tests.support.shrinking import (
    BUDGETS,
    POOLED,
    SUBSAMPLING,
    WAVEFORM,
    Pooled,
    Subsampling,
    Waveform,
    frames,
    half,
    quarter,
)


def whisper(device):
    config = WhisperConfig(
        d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, num_mel_bins=16,
        max_source_positions=25,
    )  # fmt: skip
    module = WhisperEncoder(config)
    spec = vg.BufferSpec("input_features", vg.Batch(), outputs=vg.outputs.Fields(last_hidden_state=vg.outputs.Rows()))
    encoder = graphed(module, [1, 2, 4], spec, device)
    return Case(encoder, [{"input_features": torch.randn(count, 16, 50)} for count in (3, 1, 6)], module)


def batch(lengths, shape=(8,)):
    return {"x": torch.randn(len(lengths), max(lengths), *shape), "lengths": lengths}


def conformer(device):
    module = Subsampling()

    def run(x, lengths):
        out = x.new_zeros(len(lengths), quarter(x.shape[1]), 8)
        for i, length in enumerate(lengths):
            masks = [torch.ones(1, count(length), dtype=torch.bool, device=x.device) for count in (half, quarter)]
            out[i, : quarter(length)] = module(x[i : i + 1, :length], *masks)[0]
        return out

    encoder = graphed(module, BUDGETS, SUBSAMPLING, device)
    return Case(encoder, [batch([64, 20, 33]), batch([5]), batch([40, 64, 1, 9, 30])], run)


def waveform(device):
    module = Waveform()

    def run(x, lengths):
        out = x.new_zeros(len(lengths), frames(x.shape[1]), 8)
        for own, rows, length in zip(out, x, lengths, strict=True):
            own[: frames(length)] = module(rows[None, :length])[0]
        return out

    return Case(graphed(module, BUDGETS, WAVEFORM, device), [batch([64, 20, 33], ()), batch([15], ())], run)


def pooled(device):
    class Module(Pooled):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

    def run(x, lengths):
        mask = torch.arange(x.shape[1], device=x.device) < torch.tensor(lengths, device=x.device)[:, None]
        return module(x * mask[..., None])

    module = Module()
    return Case(graphed(module, BUDGETS, POOLED, device), [batch([64, 20, 34]), batch([6])], run)


def uneven(device):
    example = load_example("uneven_outputs")

    class Module(example.Thirds):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

    def run(x, lengths):
        return torch.cat([part.sum(0, keepdim=True) for own in x.split(lengths) for part in own.split(3)])

    encoder = graphed(Module(), [vg.budgets.Budget(64, items=4), vg.budgets.Budget(160, items=8)], example.spec, device)
    some = [  # of integers, whose sums are the same in any order
        {"x": torch.randint(9, (sum(lengths), 8)).float(), "lengths": lengths}
        for lengths in ([40, 13, 11], [2], [50] * 5)
    ]
    return Case(encoder, some, run)


SOUNDS = {
    "clips of one length (Whisper)": whisper,
    "convolutions with masks (Conformer)": conformer,
    "convolutions on samples (wav2vec 2)": waveform,
    "rows pooled or repeated": pooled,
    "packed rows reduced unevenly": uneven,
}
