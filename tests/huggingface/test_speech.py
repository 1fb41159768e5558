"""`vg.wrap` on speech models: models with a head, encoders inside of models that generate, and what stays eager."""

import pytest
import torch

import varlen_graphs as vg

transformers = pytest.importorskip("transformers", minversion="5.20")

from tests.support.speech_models import FAST, LAYERS, MOONSHINE, SAMPLES  # noqa: E402

BUDGET = [vg.budgets.Budget.padded(4, 300)]
MASK = (torch.arange(300) < torch.tensor([300, 120, 77])[:, None]).long()

READ = "padding whose outputs are read by the model around the encoder"


def model_of(kind, config):
    torch.manual_seed(0)
    return getattr(transformers, kind)(config).eval().requires_grad_(False)


def clips(*shape):
    torch.manual_seed(1)
    batch = torch.randn(*MASK.shape, *shape)
    return batch * MASK.view(*MASK.shape, *[1] * len(shape))


@pytest.mark.parametrize(
    ("kind", "config", "path", "shape"),
    [
        ("Wav2Vec2ForCTC", transformers.Wav2Vec2Config(**LAYERS, vocab_size=20), "wav2vec2", ()),
        ("ParakeetForCTC", transformers.ParakeetCTCConfig(encoder_config=FAST, vocab_size=20), "encoder", (16,)),
    ],
)
def test_logits_of_all_frames_are_the_models_because_callers_decode_them(kind, config, path, shape):
    model, batch = model_of(kind, config), clips(*shape)
    expected = [model(batch, attention_mask=MASK).logits, model(batch[:1]).logits]
    vg.wrap(model, {path: BUDGET}, backend="tape", verify=vg.options.Verify(at_capture=False))
    torch.testing.assert_close(model(batch, attention_mask=MASK).logits, expected[0])
    torch.testing.assert_close(model(batch[:1]).logits, expected[1], atol=1e-5, rtol=1e-4)
    encoder = vg.encoders(model)[path]
    assert encoder.stats.eager == {READ: 1}
    assert encoder.stats.replays.total() == 1
    assert vg.encoders(model).how == {path: "speech"}
    vg.unwrap(model)
    assert "forward" not in vars(model.get_submodule(path))


def test_a_model_that_lets_padding_reach_real_frames_runs_clips_of_several_lengths_itself():
    model, batch = model_of("HubertModel", transformers.HubertConfig(**SAMPLES)), clips()
    expected = model(batch, attention_mask=MASK)[0]
    vg.wrap(model, BUDGET, backend="tape", verify=vg.options.Verify(at_capture=False))
    torch.testing.assert_close(model(batch, attention_mask=MASK)[0], expected)
    model(batch)
    (encoder,) = vg.encoders(model).values()
    assert encoder.stats.eager == {"attention_mask of clips of several lengths": 1}
    assert encoder.stats.replays.total() == 1


def test_the_encoder_of_a_model_that_generates():
    decoder = {"decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2, "vocab_size": 50}
    config = transformers.MoonshineConfig(**MOONSHINE, **decoder)
    model = model_of("MoonshineForConditionalGeneration", config)
    batch = torch.randn(1, 2500, generator=torch.Generator().manual_seed(0))
    call = {"input_values": batch, "attention_mask": torch.ones_like(batch).long(), "max_new_tokens": 4}
    expected = model.generate(**call, do_sample=False)
    vg.wrap(
        model,
        {"model.encoder": [vg.budgets.Budget.padded(1, 3000)]},
        backend="tape",
        verify=vg.options.Verify(at_capture=False),
    )
    assert torch.equal(model.generate(**call, do_sample=False), expected)
    assert vg.encoders(model)["model.encoder"].stats.replays.total() == 1


def test_the_encoder_of_a_model_whose_clips_have_no_mask():
    sizes = {"num_layers": 2, "num_heads": 2, "dim_head": 16, "hidden_dim": 32, "output_dim": 20, "context_size": 24}
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.GraniteSpeechConfig(
        encoder_config=transformers.GraniteSpeechEncoderConfig(**sizes),
        projector_config=transformers.Blip2QFormerConfig(**small, encoder_hidden_size=32),
        text_config=transformers.GraniteConfig(**small, vocab_size=60),
        audio_token_id=59,
    )
    model, clip = model_of("GraniteSpeechForConditionalGeneration", config), torch.randn(2, 70, 160)
    expected = model.get_audio_features(clip).pooler_output
    vg.wrap(model, {"model.encoder": BUDGET}, backend="tape", verify=vg.options.Verify(at_capture=False))
    out = model.get_audio_features(clip).pooler_output
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    assert vg.encoders(model)["model.encoder"].stats.replays.total() == 1


class Streaming(torch.nn.Module):
    """An encoder of streams: a call may carry state from the one before."""

    main_input_name = "input_features"

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8)])

    def forward(self, input_features, padding_cache=None):
        before = 0 if padding_cache is None else padding_cache["last"]
        return self.layers[0](input_features + before)


class OfWaves(torch.nn.Module):
    """An encoder of samples `[batch, 1, samples]`, which no configuration tells."""

    main_input_name = "input_values"

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Conv1d(1, 4, 10, 5), torch.nn.Conv1d(4, 8, 3, 2)])

    def forward(self, input_values, padding_mask=None):
        x = self.layers[1](self.layers[0](input_values)).transpose(1, 2)
        return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=x)


class Around(torch.nn.Module):
    """A model of transformers around a tower."""

    main_input_name = "input_ids"

    def __init__(self, tower):
        super().__init__()
        self.tower = tower

    def forward(self, input_ids, labels=None):
        return input_ids


def test_an_encoder_of_streams_is_graphed_by_its_calls_without_state():
    tower = Streaming().eval().requires_grad_(False)
    x = torch.randn(2, 6, 8)
    expected, streamed = tower(x), tower(x, padding_cache={"last": x[:1, :1]})
    model = vg.wrap(Around(tower), backend="tape")
    assert vg.encoders(model).eager == {"tower": "Streaming is understood by its first call"}
    assert all(torch.equal(tower(x), expected) for _ in range(3))
    encoder = vg.encoders(model)["tower"]
    assert encoder.stats.replays.total() == 3
    with pytest.warns(UserWarning, match="which hold tensors"):
        assert torch.equal(tower(x, padding_cache={"last": x[:1, :1]}), streamed)
    assert torch.equal(tower(x), expected)
    assert encoder.stats.replays.total() == 4
    assert vg.encoders(vg.unwrap(model)).eager == {}


def test_options_that_there_are_not_are_told_at_wrap():
    tower = OfWaves().eval()
    with pytest.raises(TypeError, match="nonsense"):
        vg.wrap(Around(tower), nonsense=3)
    assert "forward" not in vars(tower)


def test_a_pair_by_its_arguments_alone_is_none():
    class Pair(Around):
        config = transformers.PretrainedConfig(is_encoder_decoder=True)

        def forward(self, input_ids, decoder_input_ids=None):
            return input_ids

    assert vg.encoders(vg.wrap(Pair(OfWaves().eval()), backend="tape")).eager.keys() == {"tower"}


def test_an_encoder_that_nothing_but_a_call_describes_is_understood_by_its_first():
    tower = OfWaves().eval().requires_grad_(False)
    model = vg.wrap(Around(tower), backend="tape")
    plain = OfWaves().eval()
    plain.load_state_dict(tower.state_dict())
    for shape in ((3, 1, 100), (1, 1, 100), (2, 1, 250), (3, 1, 100)):
        x = torch.randn(shape)
        torch.testing.assert_close(tower(input_values=x).last_hidden_state, plain(x).last_hidden_state)
    encoder = vg.encoders(model)["tower"]
    assert not encoder.stats.eager
    assert encoder.stats.replays.total() == 4
    assert "by_call" in vg.encoders(model).report()


def fun_asr_nano():
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.FunAsrNanoConfig(
        audio_config={**small, "num_mel_bins": 16, "num_stacked_frames": 1},
        text_config={**small, "model_type": "qwen3", "vocab_size": 60, "num_key_value_heads": 2, "head_dim": 16},
        adaptor_config={**small, "intermediate_size": 8, "projector_hidden_size": 48},
        audio_token_id=59,
    )
    return model_of("FunAsrNanoForConditionalGeneration", config)


class Mean(torch.nn.Module):
    """A head that takes the mean of all frames, those past the end of a clip among them."""

    def __init__(self):
        super().__init__()
        self.encoder = model_of("ParakeetForCTC", transformers.ParakeetCTCConfig(encoder_config=FAST)).encoder

    def forward(self, input_features, attention_mask):
        return self.encoder(input_features, attention_mask=attention_mask).last_hidden_state.mean(1)


class NamedOtherwise(Mean):
    """Such a head with arguments that no one can guess."""

    def forward(self, sound, seconds):
        mask = torch.arange(sound.shape[1]) < (100 * seconds[:, None]).long()
        return super().forward(sound, mask.long())


class Nested(torch.nn.Module):
    """A module that takes clips in a way that no one can guess, and hands them to one that reads nothing itself."""

    def __init__(self):
        super().__init__()
        self.tower = Frames()

    def forward(self, batch):
        return self.tower(*batch).mean(1)


class Frames(Mean):
    def forward(self, input_features, attention_mask):
        return self.encoder(input_features, attention_mask=attention_mask).last_hidden_state


def x_vectors():
    config = transformers.Wav2Vec2Config(**LAYERS, tdnn_dim=[16] * 5, xvector_output_dim=16, classifier_proj_size=16)
    return model_of("Wav2Vec2ForXVector", config)


@pytest.mark.parametrize(
    ("make", "path", "shape", "run", "reason"),
    [
        (
            fun_asr_nano, "model.audio_tower", (16,),
            lambda model, clips, mask: model.get_audio_features(clips, mask).pooler_output, READ,
        ),
        (Mean, "encoder", (16,), lambda model, clips, mask: model(clips, mask), READ),
        (x_vectors, "wav2vec2", (), lambda model, clips, mask: model(clips, attention_mask=mask).embeddings, READ),
        (
            NamedOtherwise, "encoder", (16,), lambda model, clips, mask: model(clips, mask.sum(1) / 100),
            "wrap the tower alone",
        ),
        (Nested, "tower.encoder", (16,), lambda model, clips, mask: model((clips, mask)), "wrap the tower alone"),
    ],
    ids=["fun asr nano", "mean", "x-vectors", "named otherwise", "nested"],
)  # fmt: skip
def test_models_that_read_what_their_tower_makes_of_padding_get_that_of_the_tower(make, path, shape, run, reason):
    model, batch = make().eval(), clips(*shape)
    if shape == ():
        batch, mask = batch.repeat(1, 8), MASK.repeat_interleave(8, 1)
    else:
        mask = MASK
    expected, alone = run(model, batch, mask), run(model, batch[:1], mask[:1])
    vg.wrap(
        model,
        {path: [vg.budgets.Budget.padded(4, mask.shape[1])]},
        backend="tape",
        verify=vg.options.Verify(at_capture=False),
    )
    torch.testing.assert_close(run(model, batch, mask), expected, atol=1e-5, rtol=1e-4)
    encoder = vg.encoders(model)[path]
    assert [*encoder.stats.eager.values()] == [1]
    assert reason in next(iter(encoder.stats.eager))
    torch.testing.assert_close(run(model, batch[:1], mask[:1]), alone, atol=1e-5, rtol=1e-4)
    assert encoder.stats.replays.total() == 1  # of a clip without padding


def test_a_tower_that_is_wrapped_alone_leaves_zeros_for_whoever_reads_them():
    model, batch = Mean().eval(), clips(16)
    vg.wrap(model.encoder, BUDGET, backend="tape", verify=vg.options.Verify(at_capture=False))
    model(batch, MASK)
    assert not vg.encoders(model)["encoder"].stats.eager
