"""Towers of transformers without a recipe: what is found out about them, and that it is right."""

import re
from functools import cache

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import varlen_graphs as vg
from benchmarks import generic
from benchmarks.common import read_csv
from benchmarks.generic import TOWERS, build, rows_for, try_tower
from tests.support.contract import check_padding_contract
from tests.support.encoders import UNVERIFIED
from tests.support.towers import distance, tensors
from tests.support.whole_models import MROPE, WHOLE, prompt, tokens, whole_model
from varlen_graphs.declaration.reading import parse

exporters = pytest.importorskip("transformers.exporters.utils", reason="towers take no arguments so in transformers 4")
WRITTEN = {row.tower: row for row in read_csv(generic.CSV, generic.Row)}
MADE_WITH_THIS = {row.transformers for row in WRITTEN.values()} == {transformers.__version__}
BOUNDS = ("max_seqlen", "max_window_seqlen")
"""Buffers that are upper bounds of what transformers computes."""

BUDGETS = [vg.budgets.Budget(256, items=4), vg.budgets.Budget(512, items=4)]


def generic_tower(name, **changes):
    if name == "MiniMaxM3VLVisionModel" and transformers.__version__.startswith("5.17"):
        pytest.skip("its attention takes no cu_seqlens there")
    try:
        return build(name, **changes)
    except ModuleNotFoundError:
        pytest.skip(f"this transformers has no {name}")


def graphed(tower, budgets=BUDGETS[:1]):
    return vg.recipes.generic(tower, budgets, backend="tape", verify=UNVERIFIED)


@cache
def made(name):
    """Return an encoder for tests that do not change its tower."""
    return graphed(generic_tower(name), BUDGETS)


def plain(tower, encoder):
    def run(rows, items):
        with torch.no_grad():
            return tower(**{encoder.spec.row_input.name: rows, encoder.spec.layout.name: torch.tensor(items)})

    return run


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.filterwarnings("ignore:.*belong to no row")
def test_the_csv_says_what_the_script_finds(name, monkeypatch):
    """With the largest of its budgets alone."""
    monkeypatch.setattr(generic, "BUDGETS", generic.BUDGETS[-1:])
    generic_tower(name)
    row = try_tower(name)
    assert row.reason or float(row.error) <= 1e-5
    if not MADE_WITH_THIS:
        pytest.skip("the CSV is about another transformers")
    assert (*row[:4], row.reason) == (*WRITTEN[name][:4], WRITTEN[name].reason)  # the error may differ


def test_the_page_has_every_tower_and_none_that_is_off():
    page = generic.PAGE.read_text()
    assert generic.filled(page, [*WRITTEN.values()]) == page
    assert {*WRITTEN} == {*TOWERS}
    assert {row.transformers for row in WRITTEN.values()} == {*re.findall(r"transformers (\d\S*) that", page)}
    errors = [float(row.error) for row in WRITTEN.values() if not row.reason]
    assert len(errors) >= 14
    assert max(errors) <= 1e-6


GRIDS = [
    [(1, 16, 32)],  # all rows of the largest budget
    [(1, 4, 4)],
    [(1, 8, 12), (1, 4, 20), (1, 12, 12), (1, 20, 4)],
    [(2, 4, 4), (2, 12, 8)],
    [(3, 4, 8)],
    [(1, 16, 16)],  # exactly the smaller budget
]
CLIPS = [[512], [3], [37, 99, 5], [200], [101, 99, 200], [3, 2, 1, 4]]


@pytest.mark.parametrize(
    "name",
    [
        "PaddleOCRVisionModel", "Kimi_K25VisionModel", "CohereCompassVisionModel", "MuseSparkVisionModel",
        "Qwen2_5OmniAudioEncoder",
    ],
)  # fmt: skip
def test_the_padding_contract_holds(name):
    encoder = made(name)
    encoder.stats.eager.clear()
    layouts, argument = CLIPS if "Audio" in name else GRIDS, encoder.spec.layout.name
    original = plain(encoder.module, encoder)
    check_padding_contract(
        encoder, original, lambda items, seed=0: rows_for(encoder, items, seed), argument, layouts, 1e-5
    )


sides = st.sampled_from([4, 6, 8, 10, 12])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), sides, sides), min_size=1, max_size=6))
def test_videos_of_any_lengths_pool_their_frames_in_one_call_however_it_is_split(items):
    """Alone each: the original can put no two numbers of frames into one call."""
    encoder = made("Kimi_K25VisionModel")
    rows = rows_for(encoder, items, seed=1)
    out = encoder(rows, grid_thw=items)
    parts = rows.split([t * h * w for t, h, w in items])
    alone = [plain(encoder.module, encoder)(part, [item]) for part, item in zip(parts, items, strict=True)]
    for name in ("last_hidden_state", "pooler_output"):
        expected = torch.cat([getattr(one, name) for one in alone])
        assert distance(getattr(out, name), expected) < 1e-5


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(["MuseGlimmerVisionModel", "MuseSparkVisionModel"]), st.data())
def test_windows_of_any_grids_are_undone(name, data):
    """Windows are 8 patches a side; heights and widths differ for the position embeddings of Muse Spark."""
    frames, long = st.integers(1, 2), st.sampled_from([2, 6, 8, 14, 18])
    items = data.draw(st.lists(st.tuples(frames, long, long), min_size=1, max_size=3))
    encoder = made(name)
    rows, asked = rows_for(encoder, items, seed=1), {"output_hidden_states": True}
    with torch.no_grad():
        expected = encoder.module(rows, grid_thw=torch.tensor(items), **asked)
    assert distance(encoder(rows, grid_thw=items, **asked), expected) < 1e-5


@pytest.mark.parametrize("grid", [(1, 3, 4), (1, 4, 5)])
def test_sides_that_no_blocks_fill_are_refused(grid):
    encoder = made("MuseGlimmerVisionModel")
    with pytest.raises(vg.errors.LayoutError, match="must be divisible by the merge size 2"):
        encoder(rows_for(encoder, [grid], seed=0), grid_thw=[grid])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 450), min_size=1, max_size=8))
def test_clips_of_any_lengths_in_any_number(lengths):
    lengths = [*lengths, 3]  # below three frames a clip has no token
    encoder = made("Qwen2_5OmniAudioEncoder")
    rows = rows_for(encoder, lengths, seed=1)
    assert distance(encoder(rows, feature_lens=lengths), plain(encoder.module, encoder)(rows, lengths)) < 1e-5


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3_5VisionModel",
        "Kimi_K25VisionModel",
        "PaddleOCRVisionModel",
        "MiniMaxM3VLVisionModel",
        "MuseGlimmerVisionModel",
        "Qwen2_5OmniAudioEncoder",
    ],
)
@pytest.mark.filterwarnings("ignore:.*belong to no row")
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_buffers_are_what_transformers_precomputes(name, data):
    encoder = made(name)
    spec, tower = encoder.spec, encoder.module
    if spec.layout.name == "feature_lens":
        items = data.draw(st.lists(st.integers(1, 450), min_size=1, max_size=5))
        items = [*items, 200]  # with a full chunk
    else:
        t = data.draw(st.integers(1, 4))
        items = data.draw(st.lists(st.tuples(st.just(t), sides, sides), min_size=1, max_size=4))
    rows = rows_for(encoder, items, seed=2)
    expected = {spec.row_input.name: rows, spec.layout.name: torch.tensor(items)}
    exporters.precompute_export_inputs(tower, expected)
    layout = parse(spec, {spec.layout.name: items}, ())
    table = vg.layouts.ItemTable(torch.tensor(layout.items), spec.exact_budget(layout), spec.layout)
    for buffer in spec.buffers:
        if buffer.name in (*BOUNDS, "padded_feature") or buffer.name not in expected:
            continue
        if buffer.name.startswith("interp_") and isinstance(buffer, vg.buffers.DeviceBuffer):
            continue  # the tower takes heights for widths, of which what is precomputed knows nothing
        came, reference = buffer.produce(table, tower), expected[buffer.name]
        if isinstance(reference, tuple):  # the places, weights and number of tokens of Kimi K2.5
            came, reference = torch.stack(came[:2], 1), torch.stack(reference[:2], 1)
        elif buffer.name == "temporal_merge_index":
            came = came[:, :: 12 // t]  # each frame is there 12 / t times
        torch.testing.assert_close(came[: len(reference)], reference.to(came.dtype), rtol=0, atol=1e-6)


def test_settings_are_read_where_they_are_used():
    """PaddleOCR changed its corners between versions of transformers."""
    found = []
    for aligned in (False, True):
        tower = generic_tower("PaddleOCRVisionModel")
        tower.vision_model.embeddings.interpolation_align_corners = aligned
        encoder = graphed(tower)
        rows = rows_for(encoder, [(1, 12, 6)], 0)
        out = encoder(rows, grid_thw=[(1, 12, 6)])
        assert distance(out, plain(tower, encoder)(rows, [(1, 12, 6)])) < 1e-5
        found.append(encoder.spec.buffers[0].align_corners)
    assert found == [False, True]


def test_nothing_of_the_tower_is_changed():
    tower = generic_tower("GlmOcrVisionModel")
    before = {**vars(tower)}, tower.config._attn_implementation, torch.get_rng_state()
    encoder = graphed(tower)
    encoder(rows_for(encoder, [(1, 4, 4)], 0), grid_thw=[(1, 4, 4)])
    assert (vars(tower), tower.config._attn_implementation) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])


class Centred(torch.nn.Module):
    """Takes the mean of its first rows for that of all."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.mean = norm, None

    def forward(self, x):
        x = self.norm(x)
        if self.mean is None:
            self.mean = x.mean(0)
        return x - self.mean


def test_a_tower_that_initialises_itself_does_so_in_its_first_call():
    tower = generic_tower("GlmOcrVisionModel").eval()
    centred = tower.blocks[0].norm1 = Centred(tower.blocks[0].norm1)
    encoder = graphed(tower)
    assert centred.mean is None
    with pytest.raises(vg.errors.CaptureError, match=r"keeps what it computes from rows in 'blocks\.0\.norm1\.mean'"):
        encoder.capture()
    assert centred.mean is None
    rows = rows_for(encoder, [(1, 4, 4)], 0)
    out = encoder(rows, grid_thw=[(1, 4, 4)])
    assert centred.mean is not None
    assert distance(out, plain(tower, encoder)(rows, [(1, 4, 4)])) < 1e-5
    assert encoder.stats.replays.total() == 1


def test_an_encoder_may_stand_in_the_place_of_the_towers_forward():
    tower = generic_tower("GlmOcrVisionModel")
    encoder = graphed(tower)
    rows, grid = rows_for(encoder, [(2, 4, 6)], 0), torch.tensor([(2, 4, 6)])
    expected = plain(tower, encoder)(rows, [(2, 4, 6)])
    tower.forward = encoder.forward
    assert distance(tower(rows, grid), expected) < 1e-5
    assert encoder.stats.replays.total() == 1


def test_hidden_states_are_graphed():
    tower = generic_tower("GlmOcrVisionModel")
    encoder = graphed(tower)
    for items in ([(1, 4, 4)], [(2, 6, 8), (1, 4, 4)]):
        rows, grid = rows_for(encoder, items, 0), torch.tensor(items)
        expected = tower(rows, grid_thw=grid, output_hidden_states=True)
        out = encoder(rows, grid_thw=items, output_hidden_states=True)
        assert len(out.hidden_states) >= 3
        assert distance(out, expected) < 1e-5
    assert not encoder.stats.eager


def test_hidden_states_that_the_configuration_asks_for_are_graphed():
    tower = generic_tower("GlmOcrVisionModel")
    tower.config.output_hidden_states = True
    encoder = graphed(tower)
    items = [(2, 6, 8), (1, 4, 4)]
    rows, grid = rows_for(encoder, items, 0), torch.tensor(items)
    for asked in ({}, {"output_hidden_states": False}, {"output_hidden_states": True}):
        out, expected = encoder(rows, grid_thw=items, **asked), tower(rows, grid_thw=grid, **asked)
        assert (out.hidden_states is None) == (expected.hidden_states is None)
        assert distance(out, expected) < 1e-5
    assert not encoder.stats.eager


def test_hooks_see_the_original_run():
    tower = generic_tower("GlmOcrVisionModel")
    encoder = graphed(tower)
    rows = rows_for(encoder, [(1, 4, 4)], 0)
    seen = []
    hook = tower.blocks[1].register_forward_hook(lambda *args: seen.append(1))
    encoder(rows, grid_thw=[(1, 4, 4)])
    hook.remove()
    assert seen == [1]
    assert encoder.stats.eager == {"forward hooks": 1}


@pytest.mark.parametrize("seed", range(2))
def test_bfloat16_is_as_close_to_float32_as_the_original(seed):
    tower = generic_tower("GlmOcrVisionModel", seed=seed, dtype=torch.bfloat16)
    exact = generic_tower("GlmOcrVisionModel", seed=seed).to(torch.bfloat16).float()
    encoder = graphed(tower)
    items = [(1, 8, 12), (2, 4, 4)]
    rows = rows_for(encoder, items, seed).bfloat16()
    expected = plain(exact, encoder)(rows.float(), items)
    eager = distance(plain(tower, encoder)(rows, items), expected)
    out = encoder(rows, grid_thw=items)
    assert distance(out, expected) <= 1.3 * eager
    assert {tensor.dtype for tensor in tensors(out).values()} == {torch.bfloat16}


def test_heads_of_real_sizes():
    tower = generic_tower(
        "Kimi_K25VisionModel", hidden_size=144, num_attention_heads=2, num_hidden_layers=1, patch_size=14
    )
    encoder = graphed(tower)
    items = [(2, 6, 8), (2, 4, 4)]
    rows = rows_for(encoder, items, 0)
    assert distance(encoder(rows, grid_thw=items), plain(tower, encoder)(rows, items)) < 1e-5


ROPE = {name: {"full_attention": MROPE} for name in ("rope_parameters", "rope_scaling")}


def test_a_whole_model_that_no_recipe_is_for_generates_the_same_tokens(monkeypatch):
    parts = ("cohere_compass", "CohereCompassConfig", "CohereCompassForConditionalGeneration", ROPE)
    monkeypatch.setitem(WHOLE, "cohere_compass", parts)
    model = whole_model("cohere_compass")
    prompts = [prompt(model, [(1, 8, 8), (1, 4, 6)]), prompt(model, videos=[(2, 4, 4)])]
    expected = [tokens(model, inputs) for inputs in prompts]
    assert not torch.equal(expected[0], tokens(model, prompt(model, [(1, 8, 8), (1, 4, 6)], seed=1)))
    vg.wrap(model, BUDGETS, backend="tape")
    assert all(map(torch.equal, [tokens(model, inputs) for inputs in prompts], expected))
    (encoder,) = vg.encoders(model).values()
    assert encoder.stats.replays.total() == 2
    assert not encoder.stats.eager


@pytest.mark.parametrize(
    "name",
    [
        "Kimi_K25VisionModel",
        "PaddleOCRVisionModel",
        "Ernie4_5_VLMoeVisionTransformerPretrainedModel",
        "MiniMaxM3VLVisionModel",
        "Exaone4_5_VisionModel",
        "CohereCompassVisionModel",
        "Dots3NoteVisionModel",
        "Qwen4ExpVisionModel",
        "Qwen2_5OmniAudioEncoder",
    ],
)
@pytest.mark.filterwarnings("ignore:.*belong to no row")
def test_wrap_finds_towers_that_take_precomputed_tensors(name):
    if name not in TOWERS:
        pytest.skip("another name in this transformers")
    model = torch.nn.ModuleDict({"tower": generic_tower(name), "head": torch.nn.Linear(2, 2)}).eval()
    tower = model["tower"]
    found = vg.encoders(vg.wrap(model, {"tower": BUDGETS[:1]}, backend="tape", verify=UNVERIFIED))
    assert found.how == {"tower": "generic"}
    encoder = found["tower"]
    items = [37, 99] if "Audio" in name else [(1, 4, 4)]
    rows = rows_for(encoder, items, 0)
    out = tower(rows, **{encoder.spec.layout.name: torch.tensor(items)})
    assert encoder.stats.replays.total() == 1
    vg.unwrap(model)
    expected = tower(rows, **{encoder.spec.layout.name: torch.tensor(items)})
    assert distance(out.last_hidden_state, expected.last_hidden_state) < 1e-5


def test_lengths_that_a_tower_ignores_may_come():
    """Qwen2.5-Omni passes lengths after the convolutions, of which its tower makes nothing."""
    tower = generic_tower("Qwen2_5OmniAudioEncoder")
    encoder = graphed(tower)
    assert encoder.spec.ignored == ["aftercnn_lens"]
    rows = rows_for(encoder, [37, 99], 0)
    out = encoder(rows, feature_lens=[37, 99], aftercnn_lens=torch.tensor([19, 50]))
    assert distance(out, plain(tower, encoder)(rows, [37, 99])) < 1e-5
    assert not encoder.stats.eager


def test_a_field_that_belongs_to_no_row_is_none_and_said_so():
    tower = generic_tower("MiniMaxM3VLVisionModel")
    with pytest.warns(UserWarning, match=r"returns \['pooler_output'\], which belong to no row or item"):
        encoder = graphed(tower)
    assert encoder(rows_for(encoder, [(1, 4, 4)], 0), grid_thw=[(1, 4, 4)]).pooler_output is None


class Asks(torch.nn.Module):
    """Calls a helper in a way of its own."""

    def __init__(self, ask):
        super().__init__()
        self.ask, self.embed, self.config = ask, torch.nn.Linear(8, 4), transformers.PreTrainedConfig()

    def forward(self, hidden_states, grid_thw, **kwargs):
        return {"rows": self.embed(hidden_states) + self.ask(self, grid_thw, kwargs)}


def positions(merge):
    def ask(tower, grid_thw, given):
        from transformers.vision_utils import get_vision_position_ids

        return get_vision_position_ids(grid_thw, merge, kwargs=given).sum(-1, keepdim=True)

    return ask


def unknown(tower, grid_thw, given):
    return get_vision_colours(grid_thw, given)


def get_vision_colours(grid_thw, kwargs):
    return torch.tensor([sum(item) for item in grid_thw.tolist()]).sum()


def unknown_too(tower, grid_thw, given):
    return positions(2)(tower, grid_thw, given) + get_vision_colours(grid_thw, given)


def renamed(kwargs):
    kwargs.pop("old_name", None)


def area(grid_thw, kwargs):
    return grid_thw.prod(1)


def harmless(tower, grid_thw, given):
    """Calls functions that look like helpers: one returns nothing, one what a graph can hold and nobody uses."""
    renamed({})
    area(grid_thw, given)
    return positions(2)(tower, grid_thw, given)


def reads(tower, grid_thw, given):
    return positions(2)(tower, grid_thw, given) + grid_thw.tolist()[0][0]


def zeros(tower, grid_thw, given):
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights

    weights = get_vision_interpolation_indices_and_weights(grid_thw, 8, "bicubic", padding="zeros", kwargs=given)[1]
    return weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("ask", [positions(2), harmless], ids=["helpers", "and what looks like them"])
def test_a_module_of_ones_own_may_ask_the_helpers_too(ask):
    tower = Asks(ask)
    encoder = graphed(tower)
    rows = rows_for(encoder, [(1, 4, 6)], 0)
    assert torch.equal(encoder(rows, grid_thw=[(1, 4, 6)])["rows"], plain(tower, encoder)(rows, [(1, 4, 6)])["rows"])


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (unknown, r"test_generic.py:\d+ calls get_vision_colours, which no buffer replaces"),
        (
            unknown_too,
            r"test_generic.py:\d+ calls get_vision_colours, which no buffer replaces: (.|\n)*Tensor.tolist reads",
        ),
        (lambda tower, grid_thw, given: renamed(given) or 0, "requests no precomputed tensors"),
        (zeros, r"get_vision_interpolation_indices_and_weights with padding='zeros' and mode='bicubic', which no"),
        (reads, r"Tensor.tolist reads a tensor on the host\n  at .*test_generic.py:\d+, in reads"),
        (lambda tower, grid_thw, given: 0, "requests no precomputed tensors: expected a tower of transformers 5.15"),
        (lambda tower, grid_thw, given: positions(2)(tower, grid_thw, given)[:4], r"grid_thw=.* it raises Runtime"),
    ],
)
def test_what_it_cannot_do_it_refuses_with_the_reason(ask, message):
    with pytest.raises(vg.errors.SpecError, match=rf"Asks needs a recipe: (.|\n)*{message}"):
        graphed(Asks(ask))


def test_a_tower_without_the_arguments_is_refused():
    with pytest.raises(
        vg.errors.SpecError, match=r"Linear needs a recipe: its forward takes \['input'\]: expected one of"
    ):
        vg.recipes.generic(torch.nn.Linear(2, 2))
