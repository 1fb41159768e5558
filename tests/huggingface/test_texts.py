"""`vg.wrap` on text encoders: whole models, models with a head, towers beside others, and what is no encoder."""

import copy
import dataclasses
import pickle

import pytest
import torch

import varlen_graphs as vg

transformers = pytest.importorskip("transformers", minversion="5.0")

from tests.support.encoders import UNVERIFIED  # noqa: E402
from tests.support.text_encoders import PACKED, PADDED  # noqa: E402

SIZES = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip
CAUSAL = {"num_key_value_heads": 1, "head_dim": 16, "use_cache": False}
MASK = (torch.arange(20) < torch.tensor([20, 7, 3])[:, None]).long()
IDS = torch.randint(3, 97, MASK.shape, generator=torch.Generator().manual_seed(0)) * MASK


def model_of(kind, config):
    torch.manual_seed(0)
    return getattr(transformers, kind)(config).eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "config", "path"),
    [
        ("BertModel", transformers.BertConfig(**SIZES), ""),
        ("BertForSequenceClassification", transformers.BertConfig(**SIZES), "bert"),
        ("XLMRobertaForTokenClassification", transformers.XLMRobertaConfig(**SIZES), "roberta"),
        ("Qwen3Model", transformers.Qwen3Config(**SIZES, **CAUSAL), ""),
    ],
)
def test_texts_are_packed(kind, config, path):
    model = model_of(kind, config)
    expected = model(input_ids=IDS, attention_mask=MASK)[0]
    assert vg.wrap(model, {path: [64]}, backend="tape") is model
    out = model(input_ids=IDS, attention_mask=MASK)[0]
    if path == "" or "Token" in kind:  # what a model leaves past the end of a text means nothing
        out, expected = (x * MASK[..., None] for x in (out, expected))
    torch.testing.assert_close(out, expected)
    (encoder,) = vg.encoders(model).values()
    assert encoder.stats.replays.total() == 1
    assert not encoder.stats.eager
    assert "packed_text" in vg.encoders(model).report()
    vg.unwrap(model)
    assert "forward" not in vars(model.get_submodule(path))


def test_the_towers_of_clip_are_both_graphed():
    text = {**SIZES, "max_position_embeddings": 32, "eos_token_id": 98}
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**vision, "image_size": 16, "patch_size": 4}, projection_dim=16
    )
    model = model_of("CLIPModel", config)
    inputs = {"input_ids": IDS, "attention_mask": MASK, "pixel_values": torch.randn(3, 3, 16, 16)}
    expected = model(**inputs)
    vg.wrap(model, {"text_model": vg.budgets.PaddedLadder(4, 32, step=4), "vision_model": [4]}, backend="tape")
    out = model(**inputs)
    torch.testing.assert_close(out.logits_per_image, expected.logits_per_image)
    assert all(encoder.stats.replays and not encoder.stats.eager for encoder in vg.encoders(model).values())
    assert vg.encoders(model).keys() == {"text_model", "vision_model"}


def test_language_models_are_no_encoders():
    model = model_of("Qwen3ForCausalLM", transformers.Qwen3Config(**SIZES, **CAUSAL))
    with pytest.raises(vg.errors.SpecError, match="Qwen3ForCausalLM has no tower"):
        vg.wrap(model, backend="tape")
    llava = transformers.LlavaConfig(
        text_config=transformers.Qwen3Config(**SIZES, **CAUSAL),
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=16,
            patch_size=4,
        ),
        image_token_index=98,
    )
    for kind in ("LlavaModel", "LlavaForConditionalGeneration"):
        model = model_of(kind, llava)
        vg.wrap(model, [2], backend="tape")
        assert [path.rsplit(".", 1)[-1] for path in vg.encoders(model)] == ["vision_tower"]


@pytest.mark.parametrize("name", ["t5", "umt5", "bart", "marian", "m2m100"])
def test_of_an_encoder_and_a_decoder_the_encoder_is_graphed(name):
    start, config = {**PACKED, **PADDED}[name]
    start = start.removesuffix("Encoder")
    config = getattr(transformers, f"{start}Config")(**config | {"decoder_start_token_id": 2})
    vg.wrap(pair := model_of(f"{start}Model", config), backend="tape")
    assert [*vg.encoders(pair)] == ["encoder"]
    model = model_of("MarianMTModel" if name == "marian" else f"{start}ForConditionalGeneration", config)
    call = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 5}
    expected = [model.generate(**call, **how) for how in ({}, {"num_beams": 3})]
    vg.wrap(model, [64] if name != "m2m100" else vg.budgets.PaddedLadder(4, 32, step=4), backend="tape")
    for how, tokens in zip(({}, {"num_beams": 3}), expected, strict=True):
        assert torch.equal(model.generate(**call, **how), tokens)
    ((path, encoder),) = vg.encoders(model).items()
    assert path in ("encoder", "model.encoder")
    assert (encoder.why_padded is None) == (name in PACKED)
    assert encoder.stats.replays.total() == 2
    assert not encoder.stats.eager


def test_the_report_says_why_a_model_in_training_mode_has_no_encoder():
    model = vg.wrap(model_of("BertModel", transformers.BertConfig(**SIZES)), [64], backend="tape")
    model.train()
    assert "BertModel is in training mode" in vg.encoders(model).eager[""]
    model.eval()
    assert list(vg.encoders(model)) == [""]


def test_a_wrapped_model_can_be_pickled():
    model = vg.wrap(model_of("BertModel", transformers.BertConfig(**SIZES)), [64], backend="tape")
    expected = model(IDS, attention_mask=MASK).last_hidden_state
    copied = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(copied(IDS, attention_mask=MASK).last_hidden_state, expected)


def test_an_encoder_with_adapters_is_wrapped_around_them():
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.LoraConfig(r=4, target_modules=["query"], init_lora_weights=False)
    model = peft.get_peft_model(model_of("BertModel", transformers.BertConfig(**SIZES)), config).eval()
    expected = model(IDS, attention_mask=MASK).last_hidden_state * MASK[..., None]
    vg.wrap(model, [64], backend="tape")
    torch.testing.assert_close(model(input_ids=IDS, attention_mask=MASK).last_hidden_state, expected)
    assert list(vg.encoders(model)) == ["base_model.model"]


ON_THE_LEFT = MASK.flip(1)
READ = "padding whose outputs are read by the model around the encoder"
NOT_FIRST = "attention_mask does not mark the first tokens of each text"


def check_head(kind, config, ids, mask, eager):
    """Compare the logits of a wrapped model with a head with its own, and count what runs eager, by reason."""
    model = model_of(kind, config)
    expected = model(input_ids=ids, attention_mask=mask).logits
    encoders = vg.encoders(vg.wrap(model, [64], backend="tape", verify=UNVERIFIED))
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits, expected)
    assert [encoder.stats.eager for encoder in encoders.values()] == [eager]
    assert all((encoder.stats.replays.total() == 0) == bool(eager) for encoder in encoders.values())


@pytest.mark.parametrize(
    ("kind", "config", "eager"),
    [
        ("RoFormerForMultipleChoice", transformers.RoFormerConfig(**SIZES), {READ: 1}),
        ("ElectraForMultipleChoice", transformers.ElectraConfig(**SIZES, summary_type="mean"), {READ: 1}),
        ("BertForMultipleChoice", transformers.BertConfig(**SIZES), {}),
    ],
)
def test_heads_that_read_padding_get_that_of_the_model(kind, config, eager):
    check_head(kind, config, IDS[None], MASK[None], eager)


@pytest.mark.parametrize(
    ("kind", "config", "eager"),
    [
        ("XLMRobertaForSequenceClassification", transformers.XLMRobertaConfig(**SIZES), {NOT_FIRST: 1}),
        ("Qwen3ForSequenceClassification", transformers.Qwen3Config(**SIZES, **CAUSAL, pad_token_id=0), {}),
    ],
)
def test_heads_that_take_the_first_place_get_no_padding_on_the_left_from_graphs(kind, config, eager):
    ids = IDS.flip(1).masked_fill(ON_THE_LEFT == 0, config.pad_token_id)
    check_head(kind, config, ids, ON_THE_LEFT, eager)


@pytest.mark.parametrize(("pad", "texts"), [(0, slice(0, 3)), (None, slice(1, 2))])
def test_heads_that_look_for_the_last_token_may_find_it_in_padding(pad, texts):
    config = transformers.Qwen3Config(**SIZES, **CAUSAL, pad_token_id=pad)
    other = IDS.masked_fill(MASK == 0, 2)
    check_head("Qwen3ForSequenceClassification", config, other[texts], MASK[texts], {READ: 1})
    if pad is not None:
        check_head("Qwen3ForSequenceClassification", config, IDS, MASK, {})


class Mean(torch.nn.Module):
    """A head that is no model of transformers, and takes the mean of all places."""

    def __init__(self):
        super().__init__()
        self.bert = model_of("BertModel", transformers.BertConfig(**SIZES))

    def forward(self, input_ids, attention_mask):
        return self.bert(input_ids, attention_mask=attention_mask).last_hidden_state.mean(1)


class NeedsMore(Mean):
    """A head that takes more than token ids and a mask, which no signature tells."""

    def forward(self, input_ids, attention_mask, **more):
        return super().forward(input_ids, attention_mask) * more["weight"]


def test_heads_of_ones_own_are_tried_too():
    model = Mean().eval()
    expected = model(IDS, MASK)
    vg.wrap(model, [64], backend="tape")
    torch.testing.assert_close(model(IDS, MASK), expected)
    assert vg.encoders(model)["bert"].stats.eager == {READ: 1}


class States(Mean):
    """What reads nothing by itself."""

    def forward(self, input_ids, attention_mask):
        return self.bert(input_ids, attention_mask=attention_mask).last_hidden_state


class Nested(torch.nn.Module):
    """A module around it whose arguments no one can guess."""

    def __init__(self):
        super().__init__()
        self.tower = States()

    def forward(self, batch):
        return self.tower(batch["input_ids"], batch["attention_mask"]).mean(1)


@dataclasses.dataclass
class Embeddings:
    """An output that torch does not open."""

    mean: torch.Tensor


class Hidden(Mean):
    def forward(self, input_ids, attention_mask):
        return Embeddings(super().forward(input_ids, attention_mask))


class Classes(Mean):
    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids, attention_mask).argmax(1)


class Chooses(Mean):
    """A head that reads padding if it is asked to, or in another method."""

    def forward(self, input_ids, attention_mask, token_type_ids=None, *, pooling="first", other=None):
        states = self.states(input_ids, attention_mask, token_type_ids)
        return states.mean(1) if pooling == "mean" else states[:, 0] if other is None else states[:, 0] + other

    def states(self, input_ids, attention_mask, token_type_ids=None):
        return self.bert(input_ids, attention_mask, token_type_ids).last_hidden_state

    @torch.no_grad()
    def embed(self, input_ids, attention_mask):
        return self.states(input_ids, attention_mask).mean(1)


@pytest.mark.parametrize(
    ("make", "run"),
    [
        (Nested, lambda model: model({"input_ids": IDS, "attention_mask": MASK})),
        (Hidden, lambda model: model(IDS, MASK).mean),
        (Classes, lambda model: model(IDS, MASK)),
        (Chooses, lambda model: model(IDS, MASK, pooling="mean")),
        (Chooses, lambda model: model(IDS, MASK, other=torch.ones(32))),
        (Chooses, lambda model: model.embed(IDS, MASK)),
    ],
    ids=["nested", "hidden output", "classes", "by argument", "other tensor", "by method"],
)
def test_padding_is_the_models_wherever_a_module_of_ones_own_called_in_a_way_that_was_not_tried(make, run):
    model = make().eval()
    expected = run(model)
    vg.wrap(model, backend="tape", verify=vg.options.Verify(at_capture=False))
    torch.testing.assert_close(run(model), expected)
    (encoder,) = vg.encoders(model).values()
    assert [*encoder.stats.eager.values()] == [1]
    assert "wrap the tower alone" in next(iter(encoder.stats.eager))


def test_modules_of_ones_own_that_were_tried_replay_graphs():
    model = Chooses().eval()
    calls = [
        ((IDS, MASK), {}),
        ((), {"input_ids": IDS, "attention_mask": MASK}),
        ((IDS, MASK, torch.zeros_like(IDS)), {}),
    ]
    expected = [model(*args, **kwargs) for args, kwargs in calls]
    vg.wrap(model, backend="tape", verify=vg.options.Verify(at_capture=False))
    for (args, kwargs), one in zip(calls, expected, strict=True):
        torch.testing.assert_close(model(*args, **kwargs), one)
    torch.testing.assert_close(model.embed(IDS[:1], MASK[:1]), model.embed(IDS[:1], None))  # nothing is padded
    encoder = vg.encoders(model)["bert"]
    assert not encoder.stats.eager
    model.states(IDS, MASK)
    assert encoder.stats.eager.total() == 1


class Noisy(Mean):
    def forward(self, input_ids, attention_mask):
        mean = super().forward(input_ids, attention_mask)
        return mean + torch.randn_like(mean)


def test_heads_that_draw_random_numbers_leave_the_callers_alone():
    model = Noisy().eval()
    before = torch.get_rng_state()
    vg.wrap(model, backend="tape")
    assert torch.equal(torch.get_rng_state(), before)


def test_texts_with_padding_run_eager_inside_of_a_model_that_took_no_call_to_try():
    model = NeedsMore().eval()
    expected = model(IDS, MASK, weight=2)
    vg.wrap(model, [64], backend="tape")
    torch.testing.assert_close(model(IDS, MASK, weight=2), expected)
    encoder = vg.encoders(model)["bert"]
    assert [*encoder.stats.eager.values()] == [1]
    assert "wrap the tower alone" in next(iter(encoder.stats.eager))
    model(IDS[:1], torch.ones_like(MASK[:1]), weight=2)
    assert encoder.stats.replays.total() == 1
    vg.unwrap(model)
    vg.wrap(model.bert, [64], backend="tape")(IDS, attention_mask=MASK)  # nothing is around it
    assert not vg.encoders(model)["bert"].stats.eager


def test_a_head_in_training_mode_is_tried_without_its_dropout():
    model = model_of("BertForSequenceClassification", transformers.BertConfig(**SIZES)).train()
    model.bert.eval()
    before, generator = [part.training for part in model.modules()], torch.get_rng_state()
    vg.wrap(model, {"bert": [64]}, backend="tape")(IDS, attention_mask=MASK)
    assert not vg.encoders(model)["bert"].stats.eager
    assert [part.training for part in model.modules()] == before
    vg.unwrap(model)
    torch.set_rng_state(generator)
    vg.wrap(model, {"bert": [64]}, backend="tape")
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_compiled_head_is_not_compiled_to_be_tried():
    compiled = []
    model = model_of("BertForSequenceClassification", transformers.BertConfig(**SIZES))
    model.compile(backend=lambda graph, inputs: compiled.append(graph) or graph.forward)
    vg.wrap(model, [64], backend="tape")
    assert not compiled


def test_a_model_is_as_before_after_its_head_was_tried():
    model = model_of("RoFormerForMultipleChoice", transformers.RoFormerConfig(**SIZES, output_hidden_states=True))
    before = {id(part): {name: copy.copy(value) for name, value in vars(part).items()} for part in model.modules()}
    vg.unwrap(vg.wrap(model, [64], backend="tape"))
    assert {id(part): dict(vars(part)) for part in model.modules()} == before  # hooks among them
