"""SigLIP 2 with NaFlex, and the models it is part of."""

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.support.contract import check_padding_contract
from tests.support.encoders import UNVERIFIED
from tests.support.recipe_contract import RecipeContract
from tests.support.text_encoders import IS_OLD
from tests.support.towers import adapt, distance, siglip2_tower

LENGTH, ROW = 128, 3 * 4 * 4
BUDGETS = [vg.budgets.Budget(64, items=4), vg.budgets.Budget(128, items=8), vg.budgets.Budget(256, items=6)]
ONE = BUDGETS[1:2]
SHAPES = [(3, 5), (2, 2), (8, 6)]


def mask_of(shapes, length=LENGTH):
    return (torch.arange(length) < torch.tensor([h * w for h, w in shapes])[:, None]).int()


def patch_batch(shapes, seed=0, length=LENGTH):
    """Patches with NaN past the end of each image."""
    x = torch.randn(len(shapes), length, ROW, generator=torch.Generator().manual_seed(seed))
    return x.masked_fill(mask_of(shapes, length)[..., None] == 0, torch.nan)


def call(shapes, seed=0, length=LENGTH):
    """Arguments, in the tower's order."""
    return patch_batch(shapes, seed, length), mask_of(shapes, length), torch.tensor(shapes)


def masked_original(tower):
    """The tower itself; where the mask has zeros, what it gives means nothing, and becomes zeros."""

    def run(rows, shapes):
        mask = mask_of(shapes, rows.shape[1])
        with torch.no_grad():
            output = tower(rows.nan_to_num(), mask, torch.tensor(shapes))
        output.last_hidden_state *= mask[..., None]
        return output

    return run


@pytest.fixture(scope="module", params=[True, False], ids=["head", "no head"])
def tower(request):
    return siglip2_tower(vision_use_head=request.param)


@pytest.fixture(scope="module")
def encoder(tower):
    return vg.recipes.siglip2(tower, BUDGETS, backend="tape")


def test_the_padding_contract_holds(tower, encoder):
    layouts = [
        [(8, 16), (16, 8)],  # all rows of the largest budget
        [(1, 2)],
        [(1, 1)],  # the whole position table in one patch
        SHAPES,
        [(5, 5)],  # the position table as it is
        [(4, 16)],  # exactly the smallest budget
        [(2, 3)] * 8,  # no item of padding
        [(2, 60), (5, 13)],  # larger and smaller than the position table
    ]
    check_padding_contract(
        encoder, masked_original(tower), patch_batch, "spatial_shapes", layouts, 1e-5,
        more=lambda shapes: {"pixel_attention_mask": mask_of(shapes)},
    )  # fmt: skip


# On a CPU, torch resamples to grids of a width of one wrongly: see test_buffers.
sizes = st.integers(1, 24).flatmap(
    lambda height: st.tuples(st.just(height), st.integers(2, max(2, min(24, LENGTH // height))))
)


@settings(max_examples=25)
@given(st.lists(sizes, min_size=1, max_size=12), st.integers(0, 9))
def test_any_call_equals_the_original_however_it_is_padded_and_split(shapes, more):
    longest = max(h * w for h, w in shapes)
    arguments = call(shapes, length=longest + more)
    expected = masked_original(TOWER)(arguments[0], shapes)
    assert distance(SHARED(*arguments), expected) < 1e-5
    assert distance(SHARED.eager(*arguments), expected) < 1e-5


TOWER = siglip2_tower(seed=1)
SHARED = vg.recipes.siglip2(TOWER, BUDGETS, backend="tape")


def test_the_call_and_the_output_are_the_towers_own(tower, encoder):
    rows, mask, shapes = call(SHAPES)
    expected = masked_original(tower)(rows, SHAPES)
    for output in (
        encoder(rows, mask, shapes),
        encoder(pixel_values=rows, pixel_attention_mask=mask, spatial_shapes=shapes),
        encoder(rows.double(), mask.bool(), spatial_shapes=SHAPES),
        encoder(rows, mask.tolist(), SHAPES),
        encoder.eager(rows, mask, shapes),
    ):
        assert type(output) is type(expected)
        assert output.last_hidden_state.shape == (3, LENGTH, 32)
        assert distance(output, expected) < 1e-5
    assert (output.pooler_output is None) is (not tower.config.vision_use_head)
    assert not encoder.stats.eager


def test_what_a_batch_is_padded_to_is_not_computed():
    stats = SHARED.stats
    replays, rows, padding = stats.replays.copy(), stats.rows, stats.padding
    SHARED(*call([(3, 5), (2, 2)], length=4096))
    assert stats.replays - replays == {BUDGETS[0]: 1}
    assert (stats.rows - rows, stats.padding - padding) == (19, 64 - 19)


def test_a_batch_without_padding_is_neither_packed_nor_padded():
    shapes = [(4, 8), (8, 4)]
    arguments = call(shapes, length=32)
    assert distance(SHARED(*arguments), masked_original(TOWER)(arguments[0], shapes)) < 1e-5


def test_an_image_larger_than_every_budget_runs_eager_beside_the_others():
    encoder = vg.recipes.siglip2(TOWER, [64], backend="tape", verify=UNVERIFIED)
    shapes = [(3, 5), (10, 10), (2, 2)]
    arguments = call(shapes)
    assert distance(encoder(*arguments), masked_original(TOWER)(arguments[0], shapes)) < 1e-5
    assert encoder.stats.eager == {"larger than every budget": 1}
    assert encoder.stats.replays.total() == 1


def test_the_sizes_of_the_real_towers():
    """LFM2-VL's: 16 heads of 72, a table of 16 x 16; one layer of it."""
    tower = siglip2_tower(
        hidden_size=1152, intermediate_size=4304, num_hidden_layers=1, num_attention_heads=16, num_patches=256
    )
    shapes = [(12, 10), (3, 20)]
    rows = patch_batch(shapes)
    encoder = vg.recipes.siglip2(tower, [192], backend="tape", verify=UNVERIFIED)
    output = encoder(rows, mask_of(shapes), torch.tensor(shapes))
    assert distance(output, masked_original(tower)(rows, shapes)) < 1e-5


def test_hooks_and_recorded_outputs_come_from_the_original():
    tower = siglip2_tower()
    encoder = vg.recipes.siglip2(tower, BUDGETS, backend="tape")
    rows, mask, shapes = call(SHAPES)
    rows = rows.nan_to_num()
    assert len(encoder(rows, mask, shapes, output_hidden_states=True).hidden_states) >= 3
    seen = []
    layer = next(module for name, module in tower.named_modules() if name.endswith("layers.1"))
    hook = layer.register_forward_hook(lambda *_: seen.append(1))
    output = encoder(rows, mask.tolist(), SHAPES)
    hook.remove()
    assert seen == [1]
    assert encoder.stats.eager == {"output_hidden_states=True": 1, "forward hooks": 1}
    with torch.no_grad():
        assert distance(output, tower(rows, mask, shapes)) == 0


class AdaptedAttributes(nn.Module):
    """An adapter that shows all attributes a layer may be asked for."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        for name in ("weight", "bias", "in_features", "in_proj_weight", "in_proj_bias", "num_heads", "embed_dim"):
            if hasattr(base_layer, name):
                setattr(self, name, getattr(base_layer, name))

    def forward(self, *args, **kwargs):
        out = self.base_layer(*args, **kwargs)
        return (out[0] * 2 + 1, *out[1:]) if isinstance(out, tuple) else out * 2 + 1


@pytest.mark.parametrize(
    "path", ["embeddings.patch_embedding", "encoder.layers.0.self_attn.k_proj", "encoder.layers.1.mlp.fc1",
             "encoder.layers.2.layer_norm1", "post_layernorm", "head.attention", "head.mlp.fc2"],
)  # fmt: skip
def test_adapters_are_called(path):
    tower = siglip2_tower()
    parts = getattr(tower, "vision_model", tower)  # transformers 4.57 has them one level further down
    adapt(parts, path, AdaptedAttributes)
    encoder = vg.recipes.siglip2(tower, ONE, backend="tape", verify=UNVERIFIED)
    rows, mask, shapes = call(SHAPES)
    rows = rows.nan_to_num()
    output = encoder(rows, mask, shapes)
    output.last_hidden_state *= mask[..., None]  # what the original gives for padding is not cleared
    assert distance(output, masked_original(tower)(rows, SHAPES)) < 1e-5
    replaced = {"the attention of the head is not torch's own": 1} if path == "head.attention" else {}
    assert encoder.stats.eager == replaced


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows": patch_batch(SHAPES)[0]}, vg.errors.InputError, r"pixel_values is \[128, 48\]: expected \[batch, length, 48\], a batch"),
        ({"mask": mask_of([(3, 5), (2, 3), (8, 6)])}, vg.errors.LayoutError,
         r"marks \[15, 6, 48\] rows as real, but spatial_shapes describes items of \[15, 4, 48\] rows"),
        ({"mask": mask_of(SHAPES).flip(1)}, vg.errors.LayoutError, "but not the first 15: expected items padded on the right"),
        ({"shapes": [(3, 5), (2, 2), (16, 9)]}, vg.errors.LayoutError, "the longest of 144 rows, but pixel_values is"),
        ({"shapes": SHAPES[:2]}, vg.errors.LayoutError, "spatial_shapes describes 2 items"),
        ({"shapes": [(3, 5), (2, 2), (-1, 6)]}, vg.errors.LayoutError, r"spatial_shapes\[2\] is \[?\(?-1, 6"),
        ({"mask": None}, vg.errors.InputError, "argument 'pixel_attention_mask' is missing"),
    ],
)  # fmt: skip
def test_wrong_input_gets_named_errors(change, error, message):
    arguments = {"rows": patch_batch(SHAPES), "mask": mask_of(SHAPES), "shapes": SHAPES} | change
    with pytest.raises(error, match=message):
        SHARED(*arguments.values())


# Whole models

VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_patches": 25, "patch_size": 4}  # fmt: skip
WORDS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def whole(package, config_name, model_name, **configuration):
    folder = f"transformers.models.{package}"
    modeling = pytest.importorskip(f"{folder}.modeling_{package}")
    config = getattr(importlib.import_module(f"{folder}.configuration_{package}"), config_name)(**configuration)
    torch.manual_seed(0)
    model = getattr(modeling, model_name)._from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def test_lfm2_vl_generates_the_same_tokens():
    model = whole(
        "lfm2_vl", "Lfm2VlConfig", "Lfm2VlForConditionalGeneration",
        vision_config=VISION | {"vision_use_head": False},
        text_config=WORDS | {"vocab_size": 200, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"],
                             "max_position_embeddings": 256, "eos_token_id": None},
        image_token_id=190, projector_hidden_size=32,
    )  # fmt: skip

    def prompt(seed):
        shapes = [(4, 6), (8, 8), (2, 12)]
        ids = torch.tensor([[1, 5, *[190] * (24 // 4 + 64 // 4 + 24 // 4), 7, 8]])
        rows, mask, shapes = call(shapes, seed, length=64)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": rows.nan_to_num(),
                "pixel_attention_mask": mask, "spatial_shapes": shapes}  # fmt: skip

    def tokens(seed=0):
        return model.generate(**prompt(seed), max_new_tokens=8, do_sample=False)

    expected = tokens()
    assert not torch.equal(expected, tokens(seed=1))  # it sees what it is shown
    vg.wrap(model, BUDGETS, backend="tape", verify=UNVERIFIED)
    assert torch.equal(tokens(), expected)
    ((path, encoder),) = vg.encoders(model).items()
    assert path == "model.vision_tower"
    assert encoder.stats.replays.total() >= 1
    assert not encoder.stats.eager
    vg.unwrap(model)
    assert torch.equal(tokens(), expected)


def test_siglip2_scores_images_against_texts_as_before():
    model = whole(
        "siglip2", "Siglip2Config", "Siglip2Model",
        vision_config=VISION, text_config=WORDS | {"vocab_size": 99, "max_position_embeddings": 16},
    )  # fmt: skip
    rows, mask, shapes = call(SHAPES)
    inputs = {"input_ids": torch.randint(2, 99, (4, 16)), "pixel_values": rows.nan_to_num(),
              "pixel_attention_mask": mask, "spatial_shapes": shapes}  # fmt: skip
    with torch.no_grad():
        expected = model(**inputs)
        vg.wrap(model, BUDGETS, backend="tape", verify=UNVERIFIED)
        got = model(**inputs)
    assert distance(got.logits_per_image, expected.logits_per_image) < 1e-5
    assert distance(got.image_embeds, expected.image_embeds) < 1e-5
    texts = [] if IS_OLD else ["text_model"]  # transformers 4 does not pack them
    assert vg.encoders(model).keys() == {"vision_model", *texts}
    assert all(encoder.stats.replays.total() == 1 for encoder in vg.encoders(model).values())


class TestContract(RecipeContract):
    recipe, budgets, argument = staticmethod(vg.recipes.siglip2), ONE, "spatial_shapes"
    families, dtypes = ({"seed": 0}, {"seed": 1}), (torch.bfloat16, torch.float16)
    tower, original = staticmethod(siglip2_tower), staticmethod(masked_original)
    adapted, hooked = (), "encoder.layers.1"

    def example(self):
        return patch_batch(SHAPES), SHAPES

    def arguments(self, shapes):
        return {"pixel_attention_mask": mask_of(shapes), "spatial_shapes": torch.tensor(shapes)}
