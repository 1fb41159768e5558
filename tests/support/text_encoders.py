"""Small text encoders of transformers with random weights, and calls of them as tokenizers make them."""

import sys

import pytest
import torch
import transformers

import varlen_graphs as vg
from tests.support.leftovers import keep_leftovers
from tests.support.towers import distance

SIZES = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
}  # fmt: skip
ABSOLUTE = {**SIZES, "max_position_embeddings": 64}
AFTER_PADDING = {**SIZES, "max_position_embeddings": 66, "pad_token_id": 1}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**SIZES, "num_key_value_heads": 1, "head_dim": 16, "use_cache": False}
T5 = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 2,
    "relative_attention_max_distance": 20,
}
RELATIVE = {
    **ABSOLUTE, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
    "type_vocab_size": 0,
}  # fmt: skip

PAIR = {
    "vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip

PACKED = {
    "bert": ("Bert", ABSOLUTE),
    "roberta": ("Roberta", AFTER_PADDING),
    "xlm-roberta": ("XLMRoberta", AFTER_PADDING),
    "distilbert": (
        "DistilBert", {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, "max_position_embeddings": 64},
    ),
    "electra": ("Electra", {**ABSOLUTE, "embedding_size": 16}),
    "albert": ("Albert", {**ABSOLUTE, "embedding_size": 16}),
    "modernbert": (
        "ModernBert", {**SIZES, **TOKENS, "num_hidden_layers": 4, "local_attention": 16, "global_attn_every_n_layers": 2,
                       "cls_token_id": 1, "sep_token_id": 2},
    ),
    "eurobert": ("EuroBert", {**SIZES, **TOKENS, "num_key_value_heads": 1, "mask_token_id": 3}),
    "nomic-bert": ("NomicBert", SIZES),
    "qwen3": ("Qwen3", GROUPED),
    "qwen3 with windows": (
        "Qwen3", {**GROUPED, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen2": ("Qwen2", GROUPED),
    "llama": ("Llama", GROUPED),
    "mistral with windows": ("Mistral", {**GROUPED, "sliding_window": 8}),
    "gemma3 in both directions": (
        "Gemma3Text", {**GROUPED, "sliding_window": 8, "use_bidirectional_attention": True,
                       "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "mpnet": ("MPNet", {**AFTER_PADDING, "hidden_act": "gelu"}),
    "t5": ("T5Encoder", T5),
    "mt5": ("MT5Encoder", {**T5, "feed_forward_proj": "gated-gelu"}),
    "umt5": ("UMT5Encoder", {**T5, "feed_forward_proj": "gated-gelu"}),
    "bart": ("Bart", PAIR),
    "mbart": ("MBart", PAIR),
    "plbart": ("PLBart", PAIR),
    "marian": ("Marian", {**PAIR, "pad_token_id": 98}),
    "pegasus": ("Pegasus", {**PAIR, "pad_token_id": 0, "bos_token_id": 3}),
    "blenderbot": ("Blenderbot", PAIR),
}  # fmt: skip
"""Models whose attention takes packed tokens: the start of their class, and their configuration.

Of a pair of an encoder and a decoder, the encoder.
"""

PADDED = {
    "deberta": ("Deberta", RELATIVE),
    "deberta-v2": ("DebertaV2", {**RELATIVE, "position_buckets": 16, "conv_kernel_size": 3, "conv_act": "gelu"}),
    "deberta-v3": (
        "DebertaV2",
        {
            **RELATIVE,
            "position_buckets": 16,
            "max_relative_positions": 40,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        },
    ),
    "m2m100": ("M2M100", PAIR),
    "clip text": ("CLIPText", {**ABSOLUTE, "bos_token_id": 97, "eos_token_id": 98}),
    "mobilebert": (
        "MobileBert",
        {**ABSOLUTE, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    ),
    "big bird": ("BigBird", {**ABSOLUTE, "attention_type": "original_full"}),
}
"""Models that stay padded."""

OF_ONE_LENGTH = {
    "siglip text": ("SiglipText", {**ABSOLUTE, "bos_token_id": 97, "eos_token_id": 98}),
    "convbert": ("ConvBert", {**ABSOLUTE, "embedding_size": 16, "num_attention_heads": 4}),
}  # fmt: skip
"""Models whose output depends on the padding."""

REFUSED = {
    "longformer": ("Longformer", {**SIZES, "attention_window": 16}, "pads texts to whole windows"),
    "bigbird": ("BigBird", SIZES, "sparse for long texts and dense for short ones"),
    "bigbird-pegasus": (
        "BigBirdPegasus",
        {
            "vocab_size": 99,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "decoder_attention_heads": 2,
            "decoder_ffn_dim": 48,
            "block_size": 16,
        },
        "sparse for long texts and dense for short ones",
    ),
    "xmod": ("Xmod", {**AFTER_PADDING, "languages": ("en",), "default_language": "en"}, "depends on data"),
}
"""Models that graphs cannot run, and why."""

BUDGETS = [vg.budgets.Budget(64, items=4), vg.budgets.Budget(256, items=16)]
PADDED_BUDGETS = vg.budgets.PaddedLadder(batch=8, length=64, min_length=32, step=2)
LENGTHS = [[40, 3, 64, 1, 17], [5], [20, 7], [64], [1, 1, 2, 33, 8, 9]]


IS_OLD = transformers.__version__.startswith("4.")

NO_PACKED = "the attention of models of transformers 4 takes no packed tokens"
packs = pytest.mark.skipif(IS_OLD, reason=NO_PACKED)


def text_model(name, dtype=torch.float32, **changes):
    """Return a model with weights large enough that attention counts."""
    if IS_OLD:
        pytest.skip(NO_PACKED)
    start, config = ({**PACKED, **PADDED, **OF_ONE_LENGTH} | REFUSED)[name][:2]
    model_class = getattr(transformers, f"{start}Model", None)
    if model_class is None:
        pytest.skip(f"no {start}Model in transformers {transformers.__version__}")
    scripted = vars(sys.modules[model_class.__module__]).get("compute_attention_span")
    if isinstance(scripted, torch.jit.ScriptFunction):
        pytest.skip("this transformers makes host tensors of DeBERTa in scripted code, where nothing can see them")
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{start.removesuffix('Encoder')}Config")
    model = model_class(config_class(**config | changes))
    for parameter in model.parameters():
        parameter.data.mul_(5 if parameter.dim() > 1 else 1)
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    return model.to(dtype).eval()


def text_encoder(name, model=None, **options):
    """Return the encoder of a model, that refuses what it cannot prove."""
    budgets = BUDGETS if name in PACKED else PADDED_BUDGETS
    options = {"backend": "tape", "verify": vg.options.Verify(strict=True)} | options
    return vg.recipes.packed_text(text_model(name) if model is None else model, budgets, **options)


def texts(model, lengths, seed=0, length=None):
    """Return the call of a tokenizer for texts of these lengths, as keyword arguments."""
    mask = torch.arange(length or max(lengths)) < torch.tensor(lengths)[:, None]
    generator = torch.Generator().manual_seed(seed)
    pad = model.config.pad_token_id or 0
    ids = torch.randint(3, 97, mask.shape, generator=generator)
    end = getattr(model.config, "eos_token_id", None)
    end = end if isinstance(end, int) else 2
    ids[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = end
    call = {"input_ids": ids.masked_fill(~mask, pad), "attention_mask": mask.long()}
    return {name: tensor.to(model.device) for name, tensor in call.items()}


def error_of(out, expected, mask):
    """Return the largest relative error of all fields, padding not counted; outputs are of one class and shape."""
    assert type(out) is type(expected)
    assert list(out) == [name for name in expected if expected[name] is not None]
    assert out.last_hidden_state.shape == expected.last_hidden_state.shape
    real = mask.bool()
    assert not out.last_hidden_state[~real].any()
    errors = [distance(out.last_hidden_state[real], expected.last_hidden_state[real])]
    if "pooler_output" in out:
        errors.append(distance(out.pooler_output, expected.pooler_output))
    for layer, own in zip(out.get("hidden_states") or (), expected.get("hidden_states") or (), strict=True):
        errors.append(distance(layer[real], own[real]))
    return max(errors)


def check_texts(encoder, tolerance=1e-5):
    """Compare replays over NaN with the model's own eager runs, and across what padding holds."""
    model = encoder.module
    encoder.capture()
    for seed, lengths in enumerate(LENGTHS):
        call = texts(model, lengths, seed)
        encoder.poison()
        out = encoder(**call)
        with torch.no_grad():
            assert error_of(out, model(**call), call["attention_mask"]) < tolerance, lengths
        encoder(**texts(model, LENGTHS[0], 100))
        keep_leftovers(encoder)
        again = encoder(**call)
        assert all(torch.equal(out[name], again[name]) for name in out), lengths
    assert not encoder.stats.eager
    assert "verified against the module itself" in str(encoder.report())
