"""Text encoders of transformers, unmodified: packed where their attention can, else padded, else refused by name."""

import copy
import functools
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import UNVERIFIED
from tests.support.operators import operators
from varlen_graphs.huggingface.installed import Shared, Understood, install
from varlen_graphs.recipes.modes.packed_positions import PackedPositions

transformers = pytest.importorskip("transformers", reason="needs transformers")

from tests.support.text_encoders import (  # noqa: E402
    BUDGETS,
    OF_ONE_LENGTH,
    PACKED,
    PADDED,
    REFUSED,
    check_texts,
    error_of,
    packs,
    text_encoder,
    text_model,
    texts,
)

FIELDS = transformers.modeling_outputs.BaseModelOutputWithPast.__dataclass_fields__
CACHE = "cache" if "cache" in FIELDS else "past_key_values"


def from_left(call):
    """Return a call with its texts padded on the left."""
    lengths, length = call["attention_mask"].sum(1).tolist(), call["attention_mask"].shape[1]
    return {
        name: torch.stack([one.roll(length - own) for one, own in zip(tensor, lengths, strict=True)])
        for name, tensor in call.items()
    }


@functools.cache
def shared(name):
    """Return an encoder for tests that change neither it nor its model, and make no call that runs eager."""
    return text_encoder(name)


@pytest.mark.parametrize("name", PACKED)
def test_packed_texts_are_as_the_model_has_them(name):
    encoder = shared(name)
    check_texts(encoder)
    assert encoder.why_padded is None


@pytest.mark.parametrize("name", PADDED)
def test_texts_that_stay_padded_are_as_the_model_has_them_and_say_why(name):
    encoder = shared(name)
    check_texts(encoder)
    assert encoder.why_padded


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_no_graph_can_run_are_refused_with_the_reason(name):
    with pytest.raises(vg.errors.SpecError, match=re.escape(REFUSED[name][2])):
        text_encoder(name)


@pytest.mark.parametrize("name", OF_ONE_LENGTH)
def test_a_model_whose_output_depends_on_the_padding_takes_texts_of_one_length(name):
    encoder = text_encoder(name)
    model = encoder.module
    for seed, (texts_, length) in enumerate([(3, 20), (9, 20)]):
        ids = texts(model, [length] * texts_, seed)["input_ids"]
        mask = torch.ones_like(ids)
        expected = model(ids)
        assert error_of(encoder(ids), expected, mask) < 1e-5
        assert error_of(encoder(ids, attention_mask=mask), expected, mask) < 1e-5
    assert not encoder.stats.eager
    assert encoder.why_padded
    call = texts(model, [9, 5])
    torch.testing.assert_close(encoder(**call)[0], model(**call)[0])
    assert encoder.stats.eager == {"argument 'attention_mask'": 1}


@settings(max_examples=25)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=10), st.integers(0, 9), st.integers(0, 9))
def test_any_batch_of_texts_is_as_the_model_has_it(lengths, more, seed):
    encoder, pad = shared("roberta"), shared("roberta").module.config.pad_token_id
    call = texts(encoder.module, lengths, seed, min(64, max(lengths) + more))
    call["input_ids"][0, seed % lengths[0]] = pad  # inside of a text, it has the position of padding
    assert error_of(encoder(**call), encoder.module(**call), call["attention_mask"]) < 1e-5
    assert not encoder.stats.eager


@pytest.mark.parametrize("name", ["bert", "roberta", "t5", "clip text"])
def test_without_a_mask_all_tokens_are_real(name):
    encoder = shared(name)
    ids = texts(encoder.module, [9, 9])["input_ids"]
    with torch.no_grad():
        assert error_of(encoder(ids), encoder.module(ids), torch.ones_like(ids)) < 1e-5
    assert not encoder.stats.eager


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3"])
def test_texts_are_packed_under_autocast(name):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        encoder = text_encoder(name)
        call = texts(encoder.module, [9, 30, 4])
        assert error_of(encoder(**call), encoder.module(**call), call["attention_mask"]) < 0.02
    assert packs(encoder)
    assert not encoder.stats.eager


def test_token_types_come_by_name_and_by_place():
    encoder = shared("bert")
    call = texts(encoder.module, [9, 30, 4])
    types = torch.randint(2, call["input_ids"].shape)
    with torch.no_grad():
        expected = encoder.module(**call, token_type_ids=types)
    assert error_of(encoder(**call, token_type_ids=types), expected, call["attention_mask"]) < 1e-5
    assert error_of(encoder(*call.values(), types), expected, call["attention_mask"]) < 1e-5
    assert not encoder.stats.eager


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3", "t5", "umt5", "mpnet", "clip text"])
def test_hidden_states_are_graphed(name):
    encoder = shared(name)
    call = texts(encoder.module, [9, 30, 4])
    with torch.no_grad():
        expected = encoder.module(**call, output_hidden_states=True)
    out = encoder(**call, output_hidden_states=True)
    assert len(out.hidden_states) == len(expected.hidden_states)
    assert error_of(out, expected, call["attention_mask"]) < 1e-5
    assert not encoder.stats.eager


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3", "qwen3 with windows"])
def test_layers_share_a_schedule(name):
    encoder = shared(name)
    counts = operators(encoder, **texts(encoder.module, [9, 30, 4]))
    assert counts["varlen_graphs::tile_schedule"] == 1
    assert counts["varlen_graphs::attention"] == encoder.module.config.num_hidden_layers


LLAMA = {"add_rms_norm": 2, "apply_rotary": 1, "silu_mul": 1}
FUSED = {"llama": LLAMA, "mistral with windows": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA} | {
    "modernbert": {"add_layer_norm": 2, "apply_rotary": 1},
    "bert": {"add_layer_norm": 2},
    "roberta": {"add_layer_norm": 2},
    "xlm-roberta": {"add_layer_norm": 2},
}
"""Operators of a layer of models that run fused."""


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_run_fused(name, dtype):
    encoder = text_encoder(name, text_model(name, dtype))
    if dtype == torch.bfloat16:
        check_texts(encoder, 0.02)
    counts = operators(encoder, **texts(encoder.module, [9, 30, 4]))
    layers = encoder.module.config.num_hidden_layers
    assert {one: counts[f"varlen_graphs::{one}"] for one in FUSED[name]} == {
        one: times * layers for one, times in FUSED[name].items()
    }


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3"])
def test_layers_run_fused_after_the_model_has_recorded_hidden_states(name):
    model = text_model(name)
    model(**texts(model, [9, 4]), output_hidden_states=True)  # leaves hooks of transformers
    encoder = text_encoder(name, model, verify=UNVERIFIED)
    counts = operators(encoder, **texts(model, [9, 30, 4]))
    assert all(counts[f"varlen_graphs::{one}"] for one in FUSED[name])


@packs
def test_a_wrapped_model_runs_fused():
    model = vg.wrap(text_model("qwen3"), backend="tape", budgets=BUDGETS)
    call = texts(model, [9, 30, 4])
    expected = vg.unwrap(copy.deepcopy(model))(**call)
    assert error_of(model(**call), expected, call["attention_mask"]) < 1e-5
    assert operators(vg.encoders(model)[""], **call)["varlen_graphs::silu_mul"] == model.config.num_hidden_layers


@pytest.mark.parametrize("name", ["bert", "qwen3", "modernbert"])
def test_a_forward_that_is_replaced_after_the_capture_is_followed(name):
    model = text_model(name)
    encoder, call = (
        text_encoder(name, model, capture=vg.options.Capture(on_change="recapture"), verify=UNVERIFIED),
        texts(model, [9, 4]),
    )
    layer = (model.encoder.layer if name == "bert" else model.layers)[1]
    with torch.no_grad():
        encoder(**call)
        layer.forward = lambda *args, **kwargs: 2 * type(layer).forward(layer, *args, **kwargs)
        for _ in range(70):
            out = encoder(**call)
        assert error_of(out, model(**call), call["attention_mask"]) < 1e-5
    assert not encoder.stats.eager
    assert operators(encoder, **call)["varlen_graphs::tile_schedule"] == 1


class Shouting(transformers.Qwen3Model):
    """Gives twice as much for texts with one token of its own."""

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        output = super().forward(input_ids, attention_mask, **kwargs)
        output.last_hidden_state = output.last_hidden_state * (1 + (input_ids == 50).any(1)[:, None, None])
        return output


def test_models_and_layers_that_are_no_longer_those_of_transformers_run_their_own_forward():
    changed = text_model("qwen3")
    attention = changed.layers[1].self_attn
    attention.forward = lambda *args, **kwargs: (2 * type(attention).forward(attention, *args, **kwargs)[0], None)
    adapted = text_model("qwen3")
    adapted.layers[0].self_attn.q_proj = nn.Sequential(adapted.layers[0].self_attn.q_proj, nn.Tanh())
    adapted.layers[1].mlp.act_fn = nn.ReLU()
    adapted.norm = nn.LayerNorm(32)
    encoders = [text_encoder("qwen3", model) for model in (changed, adapted)]
    for encoder in encoders:
        check_texts(encoder)
    assert operators(encoders[0], **texts(changed, [9, 4]))["varlen_graphs::silu_mul"] == 0
    shouting = Shouting(text_model("qwen3").config).eval()
    call = texts(shouting, [9, 4])
    call["input_ids"][0, 3], call["input_ids"][1, :3] = 50, 7
    with torch.no_grad():
        encoder = vg.recipes.packed_text(shouting, BUDGETS, backend="tape")
        assert error_of(encoder(**call), shouting(**call), call["attention_mask"]) < 1e-5


@pytest.mark.parametrize("name", ["t5", "mpnet"])
def test_biases_by_position_follow_weights_that_change_in_place(name):
    encoder = text_encoder(name, verify=UNVERIFIED)
    call = texts(encoder.module, [9, 64, 4])
    encoder(**call)
    table = next(p for n, p in encoder.module.named_parameters() if "relative_attention_bias" in n)
    with torch.no_grad():
        table.mul_(-2)
        assert error_of(encoder(**call), encoder.module(**call), call["attention_mask"]) < 1e-5
    assert not encoder.stats.eager


def test_a_batch_costs_its_real_tokens():
    encoder = text_encoder("bert", verify=UNVERIFIED)
    encoder(**texts(encoder.module, [60, 1, 1, 1]))
    assert encoder.stats.replays == {encoder.budgets[0]: 1}
    assert encoder.stats.rows == 63


EAGER = {
    "positions": (lambda call: call | {"position_ids": torch.arange(9)[None]}, "argument 'position_ids'"),
    "embeddings": (
        lambda call: {"inputs_embeds": torch.randn(2, 9, 32), "attention_mask": call["attention_mask"]}, "no input_ids",
    ),
    "a mask of four dimensions": (
        lambda call: call | {"attention_mask": torch.ones(2, 1, 9, 9, dtype=torch.bool)}, "attention_mask of another form",
    ),
    "padding on the left": (
        lambda call: {name: tensor.flip(1) for name, tensor in call.items()},
        "attention_mask does not mark the first tokens of each text",
    ),
    "weights of attention": (lambda call: call | {"output_attentions": True}, "output_attentions=True"),
    "a tuple": (lambda call: call | {"return_dict": False}, "return_dict=False"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), EAGER.values(), ids=EAGER.keys())
def test_what_graphs_do_not_take_the_model_answers_itself(change, reason):
    model = text_model("bert")
    model.set_attn_implementation("eager")  # which returns its weights
    encoder = text_encoder("bert", model, verify=UNVERIFIED)
    call = change(texts(model, [9, 5]))
    with torch.no_grad():
        out, expected = encoder(**call), model(**call)
    torch.testing.assert_close(out[0], expected[0])
    assert encoder.stats.eager == {reason: 1}


@pytest.mark.parametrize("name", ["qwen3", "qwen3 with windows", "modernbert", "nomic-bert", "t5"])
def test_texts_padded_on_the_left_are_graphed_where_the_model_does_not_mind_the_side(name):
    encoder = text_encoder(name, verify=UNVERIFIED)
    model = encoder.module
    assert encoder.takes_left
    for seed, lengths in enumerate([[9, 5, 30], [30, 30], [1, 33], [2], [60, 3, 12]]):
        left, right = from_left(texts(model, lengths, seed)), texts(model, lengths, seed)
        for call in (left, right, left):
            with torch.no_grad():
                expected = model(**call, output_hidden_states=True)
            assert error_of(encoder(**call, output_hidden_states=True), expected, call["attention_mask"]) < 1e-5
    assert not encoder.stats.eager


def test_calls_padded_on_the_left_that_run_eager_are_answered_as_they_came():
    """Keys and values, attentions and hooks show the order of tokens."""
    model, seen = text_model("qwen3", use_cache=True), []
    model.set_attn_implementation("eager")
    encoder, call = text_encoder("qwen3", model, verify=UNVERIFIED), from_left(texts(model, [9, 5]))
    with torch.no_grad():
        for more in ({}, {"use_cache": False, "output_attentions": True}, {"use_cache": False, "return_dict": False}):
            out, expected = encoder(**call, **more), model(**call, **more)
            torch.testing.assert_close(out[0], expected[0])
            assert type(out) is type(expected)
            if more.get("return_dict", True):
                for name in expected.keys() - {CACHE, "last_hidden_state"}:
                    torch.testing.assert_close(out[name], expected[name])
            if not more:
                torch.testing.assert_close(*(one[CACHE].layers[0].keys for one in (out, expected)))
        model.layers[0].register_forward_hook(lambda layer, args, output: seen.append(args[0]))
        encoder(**call, use_cache=False), model(**call, use_cache=False)
    torch.testing.assert_close(*seen)
    assert encoder.stats.eager.total() == 4


@packs
def test_a_mask_of_ones_stays_where_it_means_something():
    """Positions that begin again are packed texts to transformers, unless there is a mask."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=99, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=97, eos_token_id=98, use_cache=False
    )
    model = transformers.GPT2Model(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(5 if parameter.dim() > 1 else 1)
    encoder = vg.recipes.packed_text(model, backend="tape")
    call = texts(model, [8, 8]) | {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])}
    with torch.no_grad():
        torch.testing.assert_close(encoder(**call)[0], model(**call)[0])


@pytest.mark.parametrize("changes", [{}, {"eos_token_id": 2}], ids=["searched", "the largest"])
@pytest.mark.parametrize("pad", [1, 97, 98])
@pytest.mark.parametrize("ends", [True, False])
def test_padding_in_which_the_pooler_finds_its_token_is_that_of_the_call(changes, pad, ends):
    model = text_model("clip text", **changes)
    encoder, call = text_encoder("clip text", model, verify=UNVERIFIED), texts(model, [12, 5, 3])
    real = call["attention_mask"].bool()
    call["input_ids"] = torch.where(real, call["input_ids"] % 90 + 5, pad)
    if ends:
        call["input_ids"][torch.arange(3), real.sum(1) - 1] = 98
    with torch.no_grad():
        expected = model(**call)
    out = encoder(**call)
    torch.testing.assert_close(out.pooler_output, expected.pooler_output)
    torch.testing.assert_close(out.last_hidden_state[real], expected.last_hidden_state[real])
    assert bool(encoder.stats.replays) or not ends


@pytest.mark.parametrize("masked", [True, False])
def test_texts_without_an_end_are_not_pooled_in_the_padding_of_graphs(masked):
    model = text_model("clip text", pad_token_id=98)  # the end pads, as with the tokenizer of CLIP
    encoder, call = text_encoder("clip text", model, verify=UNVERIFIED), texts(model, [12, 12])
    call["input_ids"][0, -1] = 5
    if not masked:
        del call["attention_mask"]
    with torch.no_grad():
        torch.testing.assert_close(encoder(**call).pooler_output, model(**call).pooler_output)
    assert encoder.stats.eager == {"input_ids of padding, which the model reads": 1}
    call["input_ids"][0, -1] = 98
    with torch.no_grad():
        torch.testing.assert_close(encoder(**call).pooler_output, model(**call).pooler_output)
    assert encoder.stats.replays.total() == 1


def check_other_padding(encoder, call, pad):
    """Check that a call is graphed, that one with other ids in its padding runs eager, and that both are right."""
    real = call["attention_mask"].bool()
    other = call | {"input_ids": call["input_ids"].masked_fill(~real, pad)}
    for own, eager in (call, {}), (other, {"input_ids of padding, which the model reads": 1}):
        with torch.no_grad():
            torch.testing.assert_close(encoder(**own)[0][real], encoder.module(**own)[0][real])
        assert encoder.stats.eager == eager
    assert encoder.stats.replays.total() == 1


@packs
@pytest.mark.parametrize("name", ["mobilebert", "esm"])
def test_padding_that_a_model_reads_is_that_of_the_call(name):
    if name == "esm":  # counts the mask tokens of a text, padding included
        config = {"vocab_size": 99, "pad_token_id": 1, "mask_token_id": 32, "token_dropout": True}
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.EsmConfig(**config, **sizes, position_embedding_type="rotary")
        model = transformers.EsmModel(config).eval()
    else:  # reads the token after each one
        model = text_model(name)
    encoder, call = text_encoder(name if name in PADDED else "bert", model, verify=UNVERIFIED), texts(model, [12, 7])
    call["input_ids"][:, 2] = 32
    check_other_padding(encoder, call, 32)


@packs
def test_padding_on_the_left_from_which_a_model_counts_positions_is_that_of_the_call():
    sizes = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
    config = transformers.M2M100Config(vocab_size=99, decoder_layers=1, decoder_attention_heads=2, **sizes)
    model = transformers.M2M100Model(config).eval().encoder
    encoder, call = text_encoder("bert", model, verify=UNVERIFIED), texts(model, [12, 7])
    call = {name: tensor.flip(1) for name, tensor in call.items()}  # padded on the left
    check_other_padding(encoder, call, 2)


def test_masks_with_gaps_run_eager_where_both_sides_are_taken():
    encoder = text_encoder("qwen3", verify=UNVERIFIED)
    call = texts(encoder.module, [9, 5])
    call["attention_mask"][0, 3] = 0
    with torch.no_grad():
        torch.testing.assert_close(encoder(**call).last_hidden_state, encoder.module(**call).last_hidden_state)
    assert encoder.stats.eager == {"attention_mask does not mark the first tokens of each text": 1}


def test_embeddings_that_require_grad_get_gradients():
    encoder = text_encoder("bert")
    embeds = torch.randn(2, 9, 32, requires_grad=True)
    with torch.enable_grad():
        encoder(inputs_embeds=embeds).pooler_output.sum().backward()
    assert embeds.grad is not None


def test_a_model_that_is_set_to_return_its_cache_runs_eager():
    encoder = text_encoder("qwen3", verify=UNVERIFIED)
    call = texts(encoder.module, [9, 5])
    encoder(**call)
    assert not encoder.stats.eager
    assert encoder(**call, use_cache=True).past_key_values is not None
    encoder.module.config.use_cache = True
    assert encoder(**call).past_key_values is not None
    assert encoder.stats.eager == {
        "use_cache=True": 1, "config.use_cache=True; set it to False to encode texts": 1,
    }  # fmt: skip
    encoder.module.config.use_cache = False
    assert encoder(**call).past_key_values is None


@pytest.mark.parametrize("name", ["bert", "roberta", "t5", "deberta"])
def test_texts_longer_than_the_largest_budget_run_eager(name):
    model = text_model(name)
    budgets = vg.budgets.PaddedLadder(batch=2, length=32) if name in PADDED else [16]
    encoder = vg.recipes.packed_text(model, budgets, backend="tape")
    call = texts(model, [33, 3])
    with torch.no_grad():
        assert error_of(encoder(**call), model(**call), call["attention_mask"]) < 1e-5
    assert encoder.stats.eager


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("name", ["bert", "roberta", "mpnet", "bart", "marian"])
def test_texts_longer_than_the_table_of_positions_are_an_error(name, flipped):
    encoder = shared(name)
    call = texts(encoder.module, [3, 65])
    if flipped:
        call = {name: tensor.flip(1) for name, tensor in call.items()}
    with pytest.raises(vg.errors.LayoutError, match="expected texts of up to 64 tokens"):
        encoder(**call)


def install_on(model):
    found = Understood(model, vg.recipes.packed_text, declared=True, options={})
    return install(found, [vg.budgets.Budget(64, items=4)], {"backend": "tape"}, Shared({}))


def test_an_encoder_that_is_installed_runs_the_model_and_not_itself():
    model = text_model("bert")
    call = texts(model, [9, 5, 30])
    with torch.no_grad():
        expected = model(**call)
    installed = install_on(model)
    assert error_of(model(**call), expected, call["attention_mask"]) < 1e-5
    odd = model(**call, position_ids=torch.arange(30)[None])
    torch.testing.assert_close(odd.pooler_output, expected.pooler_output)
    assert installed.encoder.stats.replays.total() == 1
    installed.remove()
    assert "forward" not in vars(model)


def test_vg_wrap_finds_a_text_encoder_that_is_registered(monkeypatch):
    from varlen_graphs.recipes import registry

    monkeypatch.setattr(registry, "RECIPES", dict(registry.RECIPES))
    vg.recipes.register("BertModel")(vg.recipes.packed_text)
    model = text_model("bert")
    call = texts(model, [9, 5])
    with torch.no_grad():
        expected = model(**call)
        assert (
            error_of(
                vg.wrap(model, [vg.budgets.Budget(64, items=4)], backend="tape")(**call),
                expected,
                call["attention_mask"],
            )
            < 1e-5
        )


def test_threads_share_an_encoder():
    encoder = shared("modernbert").capture()
    calls = [texts(encoder.module, [9 + seed, 5, 30], seed) for seed in range(8)]
    with torch.no_grad():
        expected = [encoder.module(**call) for call in calls]
    with ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(lambda call: encoder(**call), calls))
    for out, own, call in zip(outs, expected, calls, strict=True):
        assert error_of(out, own, call["attention_mask"]) < 1e-5


def test_a_padded_model_takes_padded_budgets_and_gets_them_for_others():
    assert text_encoder("deberta").budgets[-1].max_seqlen == 64
    model = text_model("clip text")
    assert vg.recipes.packed_text(model, [256], backend="tape").budgets[-1].max_seqlen == 64  # of its positions
    assert vg.recipes.packed_text(text_model("deberta"), backend="tape").budgets[-1].max_seqlen == 512


@packs
def test_a_model_that_replaces_parts_of_itself_is_refused_and_left_as_it_was():
    class Rewired(transformers.BertModel):
        def forward(self, input_ids=None, attention_mask=None, **given):
            self.pooler = copy.copy(self.pooler)
            return super().forward(input_ids, attention_mask, **given)

    model = Rewired(text_model("bert").config).eval()
    pooler = model.pooler
    with pytest.raises(vg.errors.SpecError, match="Rewired cannot be graphed: it replaces parts of itself as it runs"):
        vg.recipes.packed_text(model, backend="tape")
    assert model.pooler is pooler


def test_wrong_models_are_refused_by_name():
    with pytest.raises(vg.errors.SpecError, match=r"Linear takes \['input'\]: expected a text encoder of transformers"):
        vg.recipes.packed_text(nn.Linear(2, 2))
    classifier = transformers.BertForSequenceClassification(text_model("bert").config).eval()
    with pytest.raises(
        vg.errors.SpecError, match=r"BertForSequenceClassification returns a .*; graph the encoder inside of it"
    ):
        vg.recipes.packed_text(classifier)
    with pytest.raises(vg.errors.SpecError, match="BertModel is in training mode"):
        vg.recipes.packed_text(text_model("bert").train())


def test_the_recipe_leaves_the_model_as_it_was():
    model = text_model("modernbert")
    before, attention, state = vars(model.config).copy(), model.config._attn_implementation, torch.get_rng_state()
    text_encoder("modernbert", model)
    assert vars(model.config) == before
    assert model.config._attn_implementation == attention
    assert torch.equal(torch.get_rng_state(), state)


class Doubled(transformers.ConvBertModel):
    """Gives something else where a mask is passed, be it one of ones."""

    def forward(self, input_ids=None, attention_mask=None, token_type_ids=None, **kwargs):
        output = super().forward(input_ids, attention_mask, token_type_ids, **kwargs)
        output.last_hidden_state = output.last_hidden_state * (1 if attention_mask is None else 2)
        return output


@packs
def test_a_mask_of_ones_that_changes_the_output_is_not_left_out():
    model = Doubled(text_model("convbert").config).eval()
    with pytest.raises(vg.errors.SpecError, match="with a mask of ones differs for texts of"):
        vg.recipes.packed_text(model, backend="tape")


@packs
def test_a_model_whose_embedding_transformers_does_not_know_is_refused(monkeypatch):
    def unknown(model):
        raise NotImplementedError

    model = text_model("bert")
    monkeypatch.setattr(type(model), "get_input_embeddings", unknown)
    with pytest.raises(vg.errors.SpecError, match=r"with an nn\.Embedding of tokens"):
        vg.recipes.packed_text(model, backend="tape")


class Segments(transformers.BertModel):
    """Tells sentences apart by a token that its configuration does not name."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        ends = (input_ids == 103).long()
        return super().forward(input_ids, attention_mask, (ends.cumsum(1) - ends).clamp(max=1), position_ids, **kwargs)


@packs
@pytest.mark.parametrize("states", [False, True])  # returned by default, of which the check takes no notice
def test_a_model_that_counts_tokens_which_nothing_names_is_not_packed(states):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=30_000, output_hidden_states=states, **sizes)
    model = Segments(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(5 if parameter.dim() > 1 else 1)
    encoder = text_encoder("bert", model)
    assert re.search(r"differs .* in a call of items \[64 rows, 64 rows", encoder.why_padded)


@packs
@pytest.mark.parametrize(("tolerance", "why"), [(None, None), (1e-12, r"differs from the tower's own \(relative L2")])
def test_an_encoder_of_another_tolerance_is_tried_with_that(tolerance, why):
    verify = vg.options.Verify(tolerance=tolerance)
    found = vg.recipes.packed_text(text_model("bert"), backend="eager", verify=verify).why_padded
    assert found is None if why is None else re.search(why, found)


class OfShortTexts(transformers.BertModel):
    """Says nothing where it refuses a text."""

    def forward(self, input_ids, attention_mask=None, **kwargs):
        if attention_mask is None and len(input_ids) == 1 and input_ids.shape[1] > 64:
            raise ValueError
        return super().forward(input_ids, attention_mask, **kwargs)


@packs
def test_a_model_that_refuses_packed_texts_without_a_word_is_not_packed():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = OfShortTexts(transformers.BertConfig(vocab_size=99, **sizes)).eval().requires_grad_(False)
    assert text_encoder("bert", model).why_padded == "ValueError()"


@packs
def test_attention_in_chunks_longer_than_most_texts_is_not_packed():
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        vocab_size=99, hidden_size=16, num_attention_heads=1, num_key_value_heads=1, head_dim=16, intermediate_size=48,
        intermediate_size_mlp=48, num_hidden_layers=1, num_local_experts=2, moe_layers=[], pad_token_id=0,
        attention_chunk_size=200, use_cache=False, max_position_embeddings=4096,
    )  # fmt: skip
    model = transformers.Llama4TextModel(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(5 if parameter.dim() > 1 else 1)
    why = vg.recipes.packed_text(model, backend="tape").why_padded
    assert re.search(r"differs .* in a call of items \[208 rows, 5 rows\]", why)


@packs
def test_attention_that_reaches_farther_than_texts_are_made_for_is_not_packed():
    model = text_model("bert", sliding_window=100_000)
    assert "not checked for a reach of over 8192 tokens" in vg.recipes.packed_text(model, backend="tape").why_padded


def test_ranges_that_count_something_else_are_what_they_are():
    """Of 64 channels, at a budget of 64 rows."""
    model = text_model("bart", d_model=64)
    own = model.layers[0].forward

    def forward(hidden_states, *args, **kwargs):
        channels = torch.arange(64, device=hidden_states.device) / 64
        return own(hidden_states + channels, *args, **kwargs)

    model.layers[0].forward = forward
    encoder = text_encoder("bart", model, verify=UNVERIFIED)
    for lengths in ([64], [40, 20], [30, 3, 1]):
        call = texts(model, lengths)
        assert error_of(encoder(**call), model(**call), call["attention_mask"]) < 1e-5
    assert encoder.why_padded is None
    assert encoder.stats.replays == {encoder.budgets[0]: 3}


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (lambda n: torch.arange(n), [0, 1, 0, 1, 2]),
        (lambda n: torch.arange(end=n), [0, 1, 0, 1, 2]),
        (lambda n: torch.arange(2, n + 2, dtype=torch.int32), [2, 3, 2, 3, 4]),
        (lambda n: torch.arange(0, 2 * n, 2), [0, 2, 4, 6, 8]),
        (lambda n: torch.arange(n, dtype=torch.float32), [0, 1, 0, 1, 2]),
        (lambda n: torch.arange(n - 1), [0, 1, 2, 3]),
    ],
    ids=["plain", "end", "start and dtype", "step", "floats", "other length"],
)
def test_positions_of_packed_texts(count, expected):
    with PackedPositions(torch.tensor([0, 1, 0, 1, 2]), set()):
        assert count(5).tolist() == expected


@pytest.mark.parametrize(("version", "packed"), [("2.11.0", False), ("2.13.0", True)])
def test_compilers_that_hide_how_tokens_are_counted_keep_texts_padded(version, packed, monkeypatch):
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    encoder = text_encoder("bart", capture=vg.options.Capture(compile=True))
    assert (encoder.why_padded is None) == packed
    assert packed or "compiled code of torch 2.11.0" in encoder.why_padded
    assert text_encoder("bert", capture=vg.options.Capture(compile=True)).why_padded is None


def test_a_line_that_has_counted_something_else_counts_no_rows():
    others = set()
    for rows in (3, 5):  # the line asks for five numbers, whatever the rows
        with PackedPositions(torch.zeros(rows, dtype=torch.int64), others):
            channels = torch.arange(5)
        assert channels.tolist() == [0, 1, 2, 3, 4]
