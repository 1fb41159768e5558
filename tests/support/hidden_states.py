"""Encoders that return the hidden states of their layers when asked: packed, of images of one size, and padded."""

import functools

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import Attention, attention_encoder, attention_spec
from tests.support.segments import boundaries


class Layers(nn.Module):
    """Attention layers over packed rows; the dict that it returns has hidden states only where a call asks for them."""

    def __init__(self, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(depth))
        self.eval()

    def forward(self, x, cu_seqlens, max_seqlen, output_hidden_states=None, output_attentions=False):
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1], cu_seqlens, max_seqlen))
        output = {"last_hidden_state": states[-1]}
        if output_hidden_states:
            output["hidden_states"] = tuple(states)
        if output_attentions:
            output["attentions"] = tuple(state.new_ones(2, len(x), len(x)) for state in states)
        return output


FIELDS = {"last_hidden_state": vg.outputs.Rows(), "hidden_states": vg.outputs.Rows()}


def layers_encoder(module=None, outputs=None, **options):
    spec = attention_spec(
        rows=vg.inputs.Rows("x", shape=(8,)), outputs=vg.outputs.Fields(**FIELDS) if outputs is None else outputs
    )
    return attention_encoder(module=Layers() if module is None else module, spec=spec, **options)


def original_layers(module, **asked):
    """Return a function of rows and lengths that runs `Layers` without an encoder."""

    def run(rows, lengths):
        with torch.no_grad():
            return module(rows, boundaries(lengths, device=rows.device), max(lengths), **asked)

    return run


def tower_of(family="CLIPVision", device="cpu"):
    """Return a vision tower of transformers for images of one size."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=4
    )
    return getattr(transformers, f"{family}Model")(config).to(device).eval().requires_grad_(False)


def tower_encoder(tower, outputs=None, budgets=(1, 2, 4, 8), **options):
    declared = vg.outputs.Fields(**FIELDS, pooler_output=vg.outputs.Items()) if outputs is None else outputs
    spec = vg.BufferSpec("pixel_values", vg.Batch(), outputs=declared)
    return vg.GraphedEncoder(tower, list(budgets), spec, **options)


def forward_bert(model, input_ids, mask, output_hidden_states=None):
    return model(input_ids, attention_mask=mask, output_hidden_states=output_hidden_states)


def bert(device="cpu"):
    """Return a small BERT of transformers, and the function that calls it with a mask that graphs can hold."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64
    )
    model = transformers.BertModel(config).to(device).eval().requires_grad_(False)
    return model, forward_bert


def bert_encoder(model, forward, budgets=None, **options):
    spec = vg.BufferSpec(
        rows=vg.inputs.Rows("input_ids", shape=(), dtype=torch.int64),
        layout=vg.Mask("attention_mask"),
        buffers=[vg.buffers.AttentionMask("mask")],
        outputs=vg.outputs.Fields(**FIELDS, pooler_output=vg.outputs.Items()),
    )
    budgets = vg.budgets.PaddedLadder(batch=4, length=64) if budgets is None else budgets
    return vg.GraphedEncoder(model, budgets, spec, forward=forward, **options)


def texts(lengths, device="cpu"):
    """Return token ids `[batch, length]` of texts and their mask."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(100, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    return ids.to(device), mask.long().to(device)


def real_rows(output, mask):
    """Return an output with zeros in the place of rows that pad it, as graphs return them."""
    clear = functools.partial(torch.mul, mask[..., None])
    states = {"hidden_states": tuple(map(clear, output.hidden_states))} if output.hidden_states else {}
    return {"last_hidden_state": clear(output.last_hidden_state), "pooler_output": output.pooler_output} | states
