"""Encoders of texts."""

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    CLIPTextConfig,
    CLIPTextModel,
    ModernBertConfig,
    ModernBertModel,
    T5Config,
    T5EncoderModel,
)

import varlen_graphs as vg
from tests.support.declared.case import Case, alone, graphed

BUDGETS = [vg.budgets.Budget.padded(2, 16), vg.budgets.Budget.padded(4, 48)]
PACKED_BUDGETS = [vg.budgets.Budget(64, items=4), vg.budgets.Budget(192, items=8)]
LENGTHS = [[48, 20, 33], [5], [9, 40, 1, 30, 16, 2]]
SIZES = {"vocab_size": 99, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
IDS = vg.inputs.Rows("input_ids", (), dtype=torch.int64)


def batch(lengths):
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": torch.randint(3, 97, mask.shape) * mask, "attention_mask": mask}


def real(module, *fields):
    """Return the module, with zeros past the end of each text in the fields that have an entry a row."""

    def run(attention_mask, **call):
        out = dict(module(attention_mask=attention_mask, **call))
        return out | {name: out[name] * attention_mask[..., None] for name in fields}

    return run


def texts(module, forward, masks, device, outputs=None, inputs=()):
    outputs = vg.outputs.Fields(last_hidden_state=vg.outputs.Rows(), **(outputs or {}))
    spec = vg.BufferSpec(IDS, vg.Mask(), masks, outputs, inputs)
    return graphed(module, BUDGETS, spec, device, forward=forward)


def token_types(device):
    def forward(model, input_ids, token_type_ids, mask):
        return model(input_ids, token_type_ids=token_type_ids, attention_mask=mask)

    module = BertModel(BertConfig(num_hidden_layers=2, **SIZES))
    types = [vg.inputs.PerRow("token_type_ids", dtype=torch.int64, default=0)]
    encoder = texts(
        module, forward, [vg.buffers.AttentionMask("mask")], device, {"pooler_output": vg.outputs.Items()}, types
    )
    some = [batch(lengths) for lengths in LENGTHS]
    for call in some[:2]:
        call["token_type_ids"] = torch.randint(2, call["input_ids"].shape)
    return Case(encoder, some, real(module, "last_hidden_state"))


def causal(device):
    def forward(model, input_ids, mask):
        return model(input_ids, attention_mask=mask)

    module = CLIPTextModel(CLIPTextConfig(num_hidden_layers=2, eos_token_id=98, max_position_embeddings=48, **SIZES))
    encoder = texts(
        module, forward, [vg.buffers.AttentionMask("mask", causal=True)], device, {"pooler_output": vg.outputs.Items()}
    )
    return Case(encoder, [batch(lengths) for lengths in LENGTHS], real(module, "last_hidden_state"))


def windows(device):
    def forward(model, input_ids, full, sliding):
        return model(input_ids, attention_mask={"full_attention": full, "sliding_attention": sliding})

    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    config = ModernBertConfig(num_hidden_layers=4, local_attention=8, global_attn_every_n_layers=2, **tokens, **SIZES)
    module = ModernBertModel(config)
    reach = module.config.sliding_window
    masks = [vg.buffers.AttentionMask("full"), vg.buffers.AttentionMask("sliding", window=(reach, reach))]
    encoder = texts(module, forward, masks, device)
    return Case(encoder, [batch(lengths) for lengths in LENGTHS], real(module, "last_hidden_state"))


def own_bias(device):
    def forward(model, input_ids, mask):
        return model(input_ids, attention_mask=mask)

    module = T5EncoderModel(T5Config(vocab_size=99, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2))
    encoder = texts(module, forward, [vg.buffers.AttentionMask("mask")], device)
    return Case(encoder, [batch(lengths) for lengths in LENGTHS], real(module, "last_hidden_state"))


class Biased(nn.Module):
    """Attention with a mask and biases that come as one tensor."""

    def __init__(self):
        super().__init__()
        self.qkv, self.bias = nn.Linear(32, 96), nn.Embedding(32, 2)

    def forward(self, x, mask, bias):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, mask + bias).transpose(1, 2).flatten(2)


def computed_bias(device):
    buffers = [
        vg.buffers.AttentionMask("mask", dtype=None),
        vg.buffers.RelativePositionBias("bias", "bias.weight", vg.buffers.T5Buckets(32, 128)),
    ]
    spec = vg.BufferSpec(vg.inputs.Rows("x", (32,)), vg.Lengths(padded=True), buffers)
    encoder = graphed(Biased(), BUDGETS, spec, device)

    def run(x, lengths):
        out = torch.zeros_like(x)
        for i, length in enumerate(lengths):
            out[i, :length] = encoder.eager(x[i : i + 1, :length], lengths=[length])[0]
        return out

    return Case(encoder, [{"x": torch.randn(len(own), max(own), 32), "lengths": own} for own in LENGTHS], run)


class Packed(nn.Module):
    """Attention of packed texts, with positions of their own and a language an item."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.languages = nn.Embedding(99, 32), nn.Embedding(48, 32), nn.Embedding(4, 32)
        self.qkv = nn.Linear(32, 96)

    def forward(self, input_ids, position_ids, cu_seqlens, max_seqlen, language=None):
        x = self.words(input_ids) + self.places(position_ids)
        x = x if language is None else x + self.languages(language)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(1)
        return x + vg.varlen_attention(q, k, v, cu_seqlens, max_seqlen).flatten(1)


BUFFERS = [vg.buffers.RowPositions(), vg.buffers.CuSeqlens(), vg.buffers.MaxSeqlen()]


def packed(device):
    encoder = graphed(Packed(), PACKED_BUDGETS, vg.BufferSpec(IDS, vg.Mask(packed=True), BUFFERS), device)

    def run(input_ids, attention_mask):
        out = torch.zeros(*input_ids.shape, 32, device=input_ids.device)
        for i, length in enumerate(attention_mask.sum(1).tolist()):
            own = slice(i, i + 1), slice(0, length)
            out[own] = encoder.eager(input_ids[own], attention_mask=attention_mask[own])
        return out

    return Case(encoder, [batch(lengths) for lengths in LENGTHS], run)


def integers(device):
    languages = vg.buffers.DeviceBuffer(
        "language", lambda table: table.column("of")[table.row_item], any_segments=False
    )
    layout = vg.Lengths(columns=(vg.layouts.Column("of"),))
    encoder = graphed(Packed(), PACKED_BUDGETS, vg.BufferSpec(IDS, layout, [*BUFFERS, languages]), device)
    some = [
        {"input_ids": torch.randint(99, (sum(own),)), "lengths": own, "of": torch.randint(4, (len(own),)).tolist()}
        for own in LENGTHS
    ]
    return Case(encoder, some, alone(encoder, "input_ids", ["lengths", "of"]))


TEXTS = {
    "padded texts with token types (BERT)": token_types,
    "causal attention (CLIP text)": causal,
    "sliding windows (ModernBERT)": windows,
    "relative position biases as an argument": computed_bias,
    "relative position biases that it computes (T5)": own_bias,
    "padded texts, packed for the forward": packed,
    "an integer per item (language)": integers,
}
