"""Speech encoders of transformers, tiny and with random weights, and batches of clips of several lengths."""

import importlib
import inspect

import pytest
import torch

import varlen_graphs as vg
from benchmarks.generic import enlarge
from tests.support.towers import distance

SIZES = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "num_hidden_layers": 2}
SAMPLES = {
    **SIZES, "conv_dim": (16, 16, 16), "conv_kernel": (10, 3, 2), "conv_stride": (5, 2, 2), "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 6, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
LAYERS = {**SAMPLES, "feat_extract_norm": "layer", "do_stable_layer_norm": True}
FAST = {**SIZES, "num_mel_bins": 16, "subsampling_conv_channels": 8}
SEAMLESS = {
    "hidden_size": 32, "speech_encoder_layers": 2, "speech_encoder_attention_heads": 2,
    "speech_encoder_intermediate_size": 48, "feature_projection_input_dim": 16,
}  # fmt: skip
STACK = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
MOONSHINE = {
    "hidden_size": 32, "intermediate_size": 48, "encoder_num_hidden_layers": 2, "encoder_num_attention_heads": 2,
}  # fmt: skip

RAGGED = {
    "wav2vec2 large": ("wav2vec2", "Wav2Vec2Model", "Wav2Vec2Config", LAYERS),
    "hubert large": ("hubert", "HubertModel", "HubertConfig", LAYERS),
    "wavlm large": ("wavlm", "WavLMModel", "WavLMConfig", LAYERS),
    "wav2vec2 bert": (
        "wav2vec2_bert", "Wav2Vec2BertModel", "Wav2Vec2BertConfig", {**SIZES, "feature_projection_input_dim": 16},
    ),
    "parakeet": ("parakeet", "ParakeetEncoder", "ParakeetEncoderConfig", FAST),
    "lasr": ("lasr", "LasrEncoder", "LasrEncoderConfig", {**FAST, "conv_kernel_size": 9}),
    "seamless": (
        "seamless_m4t_v2", "SeamlessM4Tv2SpeechEncoder", "SeamlessM4Tv2Config", {**SEAMLESS, "add_adapter": False},
    ),
    "granite 5": (
        "granite_speech5", "GraniteSpeech5Encoder", "GraniteSpeech5EncoderConfig",
        {**SIZES, "num_mel_bins": 8, "subsample_layers": [1]},
    ),
    "gemma 4": ("gemma4", "Gemma4AudioModel", "Gemma4AudioConfig", {**SIZES, "subsampling_conv_channels": (80, 8)}),
}  # fmt: skip
"""Modules, classes and settings of those whose graphs take clips of several lengths."""

ALONE = {
    "wav2vec2 base": ("wav2vec2", "Wav2Vec2Model", "Wav2Vec2Config", SAMPLES),
    "hubert base": ("hubert", "HubertModel", "HubertConfig", SAMPLES),
    "wavlm base": ("wavlm", "WavLMModel", "WavLMConfig", SAMPLES),
    "data2vec": ("data2vec", "Data2VecAudioModel", "Data2VecAudioConfig", {**SAMPLES, "conv_pos_kernel_size": 5}),
    "wav2vec2 conformer": ("wav2vec2_conformer", "Wav2Vec2ConformerModel", "Wav2Vec2ConformerConfig", SAMPLES),
    "wav2vec2 rotary": (
        "wav2vec2_conformer", "Wav2Vec2ConformerModel", "Wav2Vec2ConformerConfig",
        {**SAMPLES, "position_embeddings_type": "rotary"},
    ),
    "wav2vec2 adapter": (
        "wav2vec2", "Wav2Vec2Model", "Wav2Vec2Config", {**LAYERS, "add_adapter": True, "num_adapter_layers": 1},
    ),
    "seamless adapter": ("seamless_m4t_v2", "SeamlessM4Tv2SpeechEncoder", "SeamlessM4Tv2Config", SEAMLESS),
    "unispeech": ("unispeech", "UniSpeechModel", "UniSpeechConfig", SAMPLES),
    "speecht5": (
        "speecht5", "SpeechT5EncoderWithSpeechPrenet", "SpeechT5Config",
        {**{name: size for name, size in LAYERS.items() if name not in SIZES}, **STACK, "hidden_size": 32},
    ),
    "moonshine": ("moonshine", "MoonshineEncoder", "MoonshineConfig", MOONSHINE),
    "speech to text": (
        "speech_to_text", "Speech2TextEncoder", "Speech2TextConfig",
        {**STACK, "d_model": 32, "input_feat_per_channel": 16, "conv_channels": 32},
    ),
    "granite 3": (
        "granite_speech", "GraniteSpeechCTCEncoder", "GraniteSpeechEncoderConfig",
        {"hidden_dim": 32, "num_heads": 2, "dim_head": 16, "num_layers": 2, "output_dim": 10, "context_size": 24},
    ),
    "phi 4": (
        "phi4_multimodal", "Phi4MultimodalAudioModel", "Phi4MultimodalAudioConfig",
        {
            "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "num_blocks": 2,
            "nemo_conv_channels": 32, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32,
        },
    ),
}  # fmt: skip
"""Those in which padding reaches real frames, so that graphs take clips of one length."""

SQUEEZED = {
    "sew": ("sew", "SEWModel", "SEWConfig", {**SAMPLES, "squeeze_factor": 2}),
    "sew d": ("sew_d", "SEWDModel", "SEWDConfig", {**SAMPLES, "squeeze_factor": 2}),
}  # fmt: skip
"""Those that squeeze frames, too, and have zeros for a last one."""

MODELS = {**RAGGED, **ALONE, **SQUEEZED}

FEW, MANY = [vg.budgets.Budget.padded(2, 160), vg.budgets.Budget.padded(4, 400)], [vg.budgets.Budget.padded(4, 4000)]
"""Budgets, and those for Moonshine, which needs 895 samples for a frame."""

LENGTHS = [[300, 77, 150], [200], [149] * 5, [400, 33]]


def speech_model(name, dtype=torch.float32):
    """Return a model with weights large enough that what reads padding shows."""
    folder, kind, config, sizes = MODELS[name]
    file = "modeling_data2vec_audio" if folder == "data2vec" else f"modeling_{folder}"
    try:
        module = importlib.import_module(f"transformers.models.{folder}.{file}")
    except ModuleNotFoundError:
        pytest.skip(f"this version of transformers has no {folder}")
    if name in SQUEEZED and "max_pool1d" not in inspect.getsource(module):
        pytest.skip("this version of transformers pools masks on the host")
    torch.manual_seed(0)
    model = getattr(module, kind)(getattr(module, config)(**sizes))
    enlarge(model)
    return model.to(dtype).eval().requires_grad_(False)


def speech_encoder(name, model=None, proven=True, **options):
    """Return the encoder of a model, with graphs that are proven unless that takes too long."""
    budgets = MANY if name == "moonshine" else FEW if proven else FEW[1:]
    options = {"backend": "tape", "verify": vg.options.Verify(strict=True, at_capture=proven)} | options
    return vg.recipes.speech(speech_model(name) if model is None else model, budgets, **options)


def clips(encoder, lengths, fill=0.0, seed=0, longer=0):
    """Return the arguments of a call with random clips of these lengths, and `fill` past the end of each."""
    real = torch.arange(max(lengths) + longer) < torch.tensor(lengths)[:, None]
    shape = encoder.spec.row_input.shape
    batch = torch.full((*real.shape, *shape), fill)
    batch[real] = torch.randn(sum(lengths), *shape, generator=torch.Generator().manual_seed(seed))
    first = next(encoder.module.parameters())
    mask = mask_of(encoder)
    return {encoder.spec.row_input.name: batch.to(first)} | ({mask: real.to(first.device, torch.int32)} if mask else {})


def mask_of(encoder):
    """Return the name of the mask that a model takes, `None` if it takes none."""
    return next((n for n in inspect.signature(encoder.module.forward).parameters if "mask" in n), None)


def error_of(encoder, output, expected, lengths):
    """Return the largest relative L2 error of the real frames of a clip in any field; fields must agree."""
    if isinstance(expected, torch.Tensor):
        output, expected, fields = {"": output}, {"": expected}, {"": encoder.spec.outputs}
    else:
        fields = encoder.spec.outputs.fields
    assert [*output] == [*expected]
    worst = 0.0
    for name, own in expected.items():
        pairs = [(output[name], own)] if isinstance(own, torch.Tensor) else zip(output[name], own, strict=True)
        of_item = fields[name].of_item
        for one, other in pairs:
            for at, rows in enumerate(lengths):
                assert not one[at, of_item(rows) :].any()
                worst = max(worst, distance(one[at, : of_item(rows)], other[at, : of_item(rows)]))
    return worst


def check_clips(encoder, tolerance=1e-5):
    """Check calls with a mask and without one against the model itself, whatever graphs and padding hold."""
    longer = 10 if encoder.spec.shortest > 400 else 1
    for seed, lengths in enumerate(LENGTHS):
        lengths = [max(rows * longer, encoder.spec.shortest) for rows in lengths]
        call, dirty = (clips(encoder, lengths, fill, seed) for fill in (0.0, torch.nan))
        if min(lengths) == max(lengths):
            without = {mask_of(encoder): None} if mask_of(encoder) else {}
            call, dirty = call | without, dirty | without
        elif encoder.alone:
            continue
        has_states = "hidden_states" in getattr(encoder.spec.outputs, "fields", ())
        asked = {"output_hidden_states": True} if seed < 2 and has_states else {}
        with torch.no_grad():
            expected = encoder.module(**call, **asked)
        if encoder.stats.replays:
            encoder.poison()
        assert error_of(encoder, encoder(**dirty, **asked), expected, lengths) < tolerance
    assert encoder.stats.replays
    assert not encoder.stats.eager


def check_squeezed(encoder, tolerance=1e-5):
    """Check clips with odd numbers of frames, and with even ones, against a model that squeezes frames."""
    encoder.capture()
    assert encoder.alone
    device = next(encoder.module.parameters()).device
    with torch.no_grad():
        for rows in (399, 400, 77, 61, 62, 150, 168):
            clip = torch.randn(3, rows, generator=torch.Generator().manual_seed(rows)).to(device)
            expected = encoder.module(clip).last_hidden_state
            encoder.poison()
            for mask in (None, torch.ones(3, rows, dtype=torch.long, device=device)):
                out = encoder(clip, attention_mask=mask).last_hidden_state
                assert out.shape == expected.shape
                assert distance(out, expected) < tolerance
        assert not encoder.stats.eager
        with pytest.raises(RuntimeError, match="size"):
            encoder(clip[:, :40])  # as the model does
    assert encoder.stats.eager == {f"clips of less than {encoder.spec.layout.shortest} rows": 1}
