"""What errors advise can be done by whoever reads them: those who use a recipe declare nothing."""

import contextlib
import re

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import attention_encoder, rows_for
from tests.support.towers import pixels, qwen3_vl_tower

transformers = pytest.importorskip("transformers", minversion="5.0")

GRID = [(1, 4, 6), (1, 4, 4)]
TO_DECLARE = re.compile(
    r"inputs.Rows\(|BufferSpec|inputs=\[|Per(Row|Item|Call)\(|declare (a |the )?(buffer|Mask|Batch)"
)
IMAGES = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


def recipe_encoder():
    return vg.recipes.qwen3_vl(qwen3_vl_tower(), [vg.budgets.Budget(128, items=4)], backend="tape")


WRONG = {
    "a dtype": lambda rows: {"hidden_states": rows.long(), "grid_thw": GRID},
    "an undeclared tensor": lambda rows: {"hidden_states": rows, "grid_thw": GRID, "attention_mask": torch.ones(2)},
    "too few dimensions": lambda rows: {"hidden_states": rows[0], "grid_thw": GRID},
    "a batch": lambda rows: {"hidden_states": rows[None], "grid_thw": GRID},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_calls_of_a_recipe_are_told_nothing_to_declare(wrong):
    with pytest.raises(vg.errors.VarlenGraphsError) as raised:
        recipe_encoder()(**WRONG[wrong](pixels(GRID)))
    assert not TO_DECLARE.search(str(raised.value))


@pytest.mark.parametrize(("call", "advice"), [
    ({"x": rows_for([6]).long(), "lengths": [6]}, r"declare rows=vg.inputs.Rows\('x', dtype=torch.int64\)"),
    ({"x": rows_for([6]), "lengths": [6], "scale": torch.ones(6)}, r"declare inputs=\[vg.inputs.PerRow\('scale'"),
    ({"x": rows_for([6])[None], "lengths": [6]}, "for batches declare Mask"),
])  # fmt: skip
def test_those_who_declare_are_told_what_to_declare(call, advice):
    with pytest.raises(vg.errors.InputError, match=advice):
        attention_encoder(
            spec=vg.BufferSpec(
                vg.inputs.Rows("x", (8,)), vg.Lengths(), [vg.buffers.CuSeqlens(), vg.buffers.MaxSeqlen()]
            )
        )(**call)


def test_a_wrapped_model_warns_of_nothing_to_declare():
    torch.manual_seed(0)
    model = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**IMAGES)).eval().requires_grad_(False)
    vg.wrap(model, [2], backend="tape")
    images = torch.randn(2, 3, 16, 16)
    for call in ({"pixel_values": images.long()}, {"pixel_values": images, "mask": torch.ones(2)}):
        with (
            pytest.warns(UserWarning, match=r"a call of CLIPVisionModel.* runs eager") as warned,
            contextlib.suppress(RuntimeError, ValueError, TypeError),  # of the model itself
        ):
            model(**call)
        assert not any(TO_DECLARE.search(str(one.message)) for one in warned)
        vg.wrap(vg.unwrap(model), [2], backend="tape")


LOAD = r"on the meta device, where weights have no values: .*load_state_dict\(\.\.\., assign=True\)"


def on_meta(make):
    with torch.device("meta"):
        return make()


def text_model():
    sizes = {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    }
    return transformers.BertModel(transformers.BertConfig(**sizes)).eval()


def an_encoder(module):
    return vg.GraphedEncoder(module, [64], vg.BufferSpec(vg.inputs.Rows("input", (8,)), vg.Lengths()), backend="tape")


@pytest.mark.parametrize("use", [
    lambda: vg.wrap(on_meta(text_model), backend="tape"),
    lambda: vg.recipes.packed_text(on_meta(text_model), backend="tape"),
    lambda: vg.wrap(qwen3_vl_tower().to("meta"), backend="tape"),
    lambda: vg.recipes.generic(qwen3_vl_tower().to("meta"), backend="tape"),
    lambda: vg.recipes.by_batch(on_meta(lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**IMAGES)))),
    lambda: an_encoder(on_meta(lambda: nn.Linear(8, 8).eval()))(torch.randn(5, 8), lengths=[5]),
    lambda: an_encoder(on_meta(lambda: nn.Linear(8, 8).eval()))(torch.randn(5, 8, device="meta"), lengths=[5]),
    lambda: an_encoder(on_meta(lambda: nn.Linear(8, 8).eval())).capture(),
])  # fmt: skip
def test_a_module_without_values_is_to_be_loaded_first(use):
    with pytest.raises((vg.errors.SpecError, vg.errors.InputError), match=LOAD):
        use()


def test_rows_without_values_are_refused():
    with pytest.raises(
        vg.errors.InputError, match="input is on the meta device, where it has no values: expected it on cpu"
    ):
        an_encoder(nn.Linear(8, 8).eval())(torch.randn(5, 8, device="meta"), lengths=[5])


def test_a_module_on_meta_may_be_loaded_after_the_encoder_was_made():
    module = on_meta(lambda: nn.Linear(8, 8).eval().requires_grad_(False))
    encoder, rows = an_encoder(module), torch.randn(5, 8)
    module.load_state_dict(nn.Linear(8, 8).state_dict(), assign=True)
    with torch.no_grad():
        torch.testing.assert_close(encoder(rows, lengths=[5]), module(rows))
    assert encoder.stats.replays.total() == 1
