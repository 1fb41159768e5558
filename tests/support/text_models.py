"""Text encoders of transformers with random weights, in padded batches with masks of their own form."""

import pytest
import torch
import transformers

import varlen_graphs as vg
from tests.support.towers import distance

SMALL = {
    "vocab_size": 99, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 98,
}  # fmt: skip

WINDOW = 8
"""How far a token of ModernBERT sees in layers with windows: much less than the texts are long."""

BUDGETS = [vg.budgets.Budget.padded(2, 24), vg.budgets.Budget.padded(4, 64)]

TEXTS = [[60, 33, 64, 1], [5], [20, 7], [64] * 4, [24, 1, 2, 33, 8]]


def text_model(name, dtype=torch.float32, **changes):
    """Return a model with weights large enough that attention, and so its mask, counts."""
    if transformers.__version__.startswith("4."):
        pytest.skip("models of transformers 4 look at masks of four dimensions, too")
    torch.manual_seed(0)
    if name == "bert":
        model = transformers.BertModel(transformers.BertConfig(num_hidden_layers=2, **SMALL | changes))
    elif name == "clip":
        model = transformers.CLIPTextModel(transformers.CLIPTextConfig(num_hidden_layers=2, **SMALL | changes))
    elif name == "modernbert":
        own = {"local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}
        config = transformers.ModernBertConfig(num_hidden_layers=4, **SMALL | own | changes)
        model = transformers.ModernBertModel(config)
    else:
        sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "vocab_size": 99}
        buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
        return transformers.T5EncoderModel(transformers.T5Config(**sizes | buckets | changes)).to(dtype).eval()
    for parameter in model.parameters():
        parameter.data.mul_(10 if parameter.dim() > 1 else 1)
    return model.to(dtype).eval()


def one_mask(model, input_ids, mask):
    return model(input_ids, attention_mask=mask)


def two_masks(model, input_ids, full, sliding):
    return model(input_ids, attention_mask={"full_attention": full, "sliding_attention": sliding})


def masks_of(name, **options):
    """Return the masks that a model computes by itself, and the forward that takes them."""
    if name == "modernbert":
        sliding = vg.buffers.AttentionMask("sliding", window=(WINDOW, WINDOW), **options)
        return [vg.buffers.AttentionMask("full", **options), sliding], two_masks
    return [vg.buffers.AttentionMask("mask", causal=name == "clip", **options)], one_mask


def text_encoder(name, model, masks=None, forward=one_mask, declared_by="user", **options):
    """Return an encoder of a model in padded batches; without `masks`, with its own."""
    if masks is None:
        masks, forward = masks_of(name)
    outputs = {"last_hidden_state": vg.outputs.Rows()}
    if name in ("bert", "clip"):
        outputs["pooler_output"] = vg.outputs.Items()
    spec = vg.BufferSpec(
        rows=vg.inputs.Rows("input_ids", shape=(), dtype=torch.int64),
        layout=vg.Mask("attention_mask"),
        buffers=masks,
        outputs=vg.outputs.Fields(**outputs),
        declared_by=declared_by,
    )
    return vg.GraphedEncoder(model, BUDGETS, spec, forward=forward, **({"backend": "tape"} | options))


def texts(lengths, seed=0, device="cpu"):
    """Return token ids, each text ending in the last token as those of a tokenizer do, and the mask of real ones."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(3, 98, mask.shape, generator=torch.Generator().manual_seed(seed)) * mask
    ids[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = 98
    return ids.to(device), mask.long().to(device)


def error_of(out, expected, mask):
    """Return the largest relative error of the outputs, past the end of texts not counted."""
    real = [distance(out.last_hidden_state[mask.bool()], expected.last_hidden_state[mask.bool()])]
    pooled = [distance(out.pooler_output, expected.pooler_output)] if "pooler_output" in out else []
    return max(real + pooled)


def check_texts(encoder, model, device="cpu", tolerance=1e-5):
    """Compare replays over NaN with the model's own eager runs, which make masks by themselves."""
    encoder.capture()
    for seed, lengths in enumerate(TEXTS):
        ids, mask = texts(lengths, seed, device)
        encoder.poison()
        out = encoder(ids, attention_mask=mask)
        assert not out.last_hidden_state[mask == 0].any()
        assert error_of(out, model(ids, attention_mask=mask), mask) < tolerance, lengths
    assert not encoder.stats.eager
    assert "verified against the module itself" in str(encoder.report())
