"""MiniCPM-V: its vision transformer and resampler as one encoder, and the resampler alone."""

import re

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.support.contract import check_half_precision, check_padding_contract
from tests.support.encoders import UNVERIFIED
from tests.support.minicpm import SIDE, Resampler, Resampler45, models, original, slices_of
from tests.support.towers import Adapted, adapt, distance, equal_bits
from varlen_graphs.recipes.families.minicpmv import position_buckets, row_positions

VERSIONS = ["2.5", "2.6", "4.5"]
"""Of 4.0 the modules are those of 2.6."""

BUDGETS = [vg.budgets.Budget(128, items=3), vg.budgets.Budget(384, items=6)]
ONE = BUDGETS[1:]

SIZES = [(5, 7), (3, 3), (12, 9), (1, 1), (2, 25)]
TIMES = [[-1], [3, 70], [-1, 190]]

TOWERS = {version: models(version) for version in VERSIONS}
SHARED = {version: vg.recipes.minicpmv(*TOWERS[version], BUDGETS, backend="tape") for version in VERSIONS}


def patches(layout, seed=0):
    return vg.recipes.pack_slices(slices_of(layout[0], seed))


def arguments(layout):
    return {"tgt_sizes": layout[0]} | ({"temporal_ids": layout[1]} if len(layout) > 1 else {})


def padded_original(version):
    return lambda rows, layout: original(*TOWERS[version], unpacked(rows, layout[0]), *layout)


def unpacked(rows, sizes):
    parts = rows.split([h * w for h, w in sizes])
    return [part.unflatten(1, (3, 4, 4)).permute(1, 2, 0, 3).flatten(2) for part in parts]


LAYOUTS = [
    [(12, 16), (12, 16)],  # all rows of the largest budget
    [(1, 1)],
    SIZES,
    [(8, 16)],  # exactly the smaller budget
    [(2, 3)] * 6,  # no slice of padding
    [(25, 3), (1, 49), (50, 2)],  # where floor and bucketize are not the same
]


@pytest.mark.parametrize("version", ["2.5", "2.6"])
def test_the_padding_contract_holds(version):
    layouts = [(sizes,) for sizes in LAYOUTS]
    check_padding_contract(
        SHARED[version], padded_original(version), patches, "tgt_sizes", layouts, 1e-5, more=arguments
    )


def test_the_padding_contract_holds_for_groups():
    layouts = [
        *[(sizes, [[-1]] * len(sizes)) for sizes in LAYOUTS],
        (SIZES, TIMES),
        ([(12, 16), (12, 16)], [[0, 10]]),
        ([(2, 3)] * 6, [[1, 2, 3, 4, 5, 6]]),  # five slots for groups without slices
        ([(1, 1), (9, 9), (2, 2)], [[5], [-1, -1]]),
    ]
    original, encoder = padded_original("4.5"), SHARED["4.5"]
    check_padding_contract(encoder, original, patches, "tgt_sizes", layouts, 1e-5, more=arguments)


sides = st.one_of(st.integers(1, 12), st.sampled_from([25, 49, 50, 58]))
sizes = st.tuples(sides, st.integers(1, 5)).flatmap(st.permutations).map(tuple)


@settings(max_examples=15)
@given(st.lists(sizes, min_size=1, max_size=8), st.sampled_from(["2.5", "2.6"]))
def test_any_call_equals_the_original_however_it_is_split(sizes, version):
    rows = patches((sizes,))
    expected = padded_original(version)(rows, (sizes,))
    assert distance(SHARED[version](rows, tgt_sizes=sizes), expected) < 1e-5
    assert distance(SHARED[version].eager(rows, tgt_sizes=sizes), expected) < 1e-5


@settings(max_examples=20)
@given(st.lists(st.lists(st.tuples(sizes, st.integers(-1, 199)), min_size=1, max_size=4), min_size=1, max_size=5))
def test_any_groups_equal_the_original_however_they_are_split(groups):
    sizes = [size for group in groups for size, _ in group]
    times = [[time for _, time in group] for group in groups]
    rows = patches((sizes,))
    expected = padded_original("4.5")(rows, (sizes, times))
    assert expected.shape[0] == len(groups)
    assert distance(SHARED["4.5"](rows, tgt_sizes=sizes, temporal_ids=times), expected) < 1e-5
    assert distance(SHARED["4.5"].eager(rows, tgt_sizes=sizes, temporal_ids=times), expected) < 1e-5


def test_no_time_is_said_in_many_ways():
    encoder, rows = SHARED["4.5"], patches((SIZES,))
    expected = padded_original("4.5")(rows, (SIZES,))  # which gives no temporal_ids
    for times in ([[-1]] * 5, [-1] * 5, [[None]] * 5, [None] * 5, None, torch.full((5,), -1)):
        assert distance(encoder(rows, tgt_sizes=SIZES, temporal_ids=times), expected) < 1e-5
    assert distance(encoder(rows, tgt_sizes=SIZES), expected) < 1e-5
    # 0 is a time. A slice alone does not show that: the same is added to all of its keys.
    zero, none = ([[time, 7, time], [time], [-1]] for time in (0, -1))
    at_zero = encoder(rows, tgt_sizes=SIZES, temporal_ids=zero)
    assert distance(at_zero, encoder(rows, tgt_sizes=SIZES, temporal_ids=none)) > 1e-3
    assert distance(at_zero, padded_original("4.5")(rows, (SIZES, zero))) < 1e-5


def test_nested_and_mixed_forms_mean_the_same():
    encoder, rows = SHARED["4.5"], patches((SIZES,))
    nested = encoder(rows, tgt_sizes=SIZES, temporal_ids=[[-1], [7], [2, 6, 9]])
    assert nested.shape == (3, 6, 64)
    assert equal_bits(nested, encoder(rows, tgt_sizes=SIZES, temporal_ids=[-1, 7, [2, 6, 9]]))
    assert equal_bits(nested, encoder(rows, torch.tensor(SIZES), [(None,), [7], torch.tensor([2, 6, 9])]))


def original_ids(size):
    """As the original says it, of one side."""
    boundaries = torch.arange(1 / SIDE, 1.0, 1 / SIDE)
    return torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / torch.tensor([size]).int()[0]), boundaries, right=True)


def test_position_ids_are_those_of_the_original_for_every_size():
    table = vg.buffers.Lookup("ids", lambda size: position_buckets(size, SIDE), axes=("w",))
    other = set()
    for size in range(1, 141):
        expected = original_ids(size)
        items = vg.layouts.ItemTable(torch.tensor([[1, 1, size]]), vg.budgets.Budget(size), vg.layouts.GridHW())
        assert torch.equal(table.produce(items, None)[:, 0], expected), size
        closed_form = (torch.arange(size) * SIDE // size).clamp(max=SIDE - 1)
        other |= set() if torch.equal(closed_form, expected) else {size}
    assert {25, 49, 50, 55, 58, 77, 82, 86, 94, 98, 100, 110, 115, 135} <= other
    assert all(torch.equal(position_buckets(size, SIDE), original_ids(size)) for size in range(141, 2049))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_position_ids_do_not_follow_the_default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        got = [position_buckets(size, SIDE) for size in range(1, 141)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(ids, original_ids(size)) for size, ids in enumerate(got, start=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_position_ids_of_2_5_are_those_of_the_installed_transformers(dtype):
    """Which computes them in other ways from version to version, in some in the dtype of the pixels."""
    embeddings = models("2.5")[0].embeddings.to(dtype)
    asked = []
    embeddings.position_embedding.register_forward_pre_hook(lambda module, arguments: asked.append(arguments[0][0]))
    for size in (1, 2, 25, 49, 70, 140, 499, 1024, 1300):
        pixels, mask = torch.zeros(1, 3, 4, 4 * size, dtype=dtype), torch.ones(1, 1, size, dtype=torch.bool)
        embeddings(pixels, mask)
        assert torch.equal(row_positions(embeddings, size), asked.pop()), size
        assert not asked


def test_temporal_ids_may_be_those_of_the_processor():
    """One list of groups per prompt, of scalar tensors; a prompt without images has none."""
    encoder, rows = SHARED["4.5"], patches((SIZES,))
    expected = encoder(rows, tgt_sizes=SIZES, temporal_ids=[[-1], [7], [2, 6, 9]])
    ids = [[[torch.tensor(-1)], [torch.tensor(7)]], [], [[torch.tensor(time) for time in (2, 6, 9)]]]
    assert equal_bits(encoder(rows, tgt_sizes=SIZES, temporal_ids=ids), expected)
    assert equal_bits(
        encoder(rows, tgt_sizes=SIZES, temporal_ids=[group for prompt in ids for group in prompt]), expected
    )


def test_graphs_are_proven_against_the_modules_of_the_model():
    for version in VERSIONS:
        SHARED[version].capture()
        assert "the module itself" in str(SHARED[version].report())


def test_a_vision_transformer_that_computes_something_else_answers_itself():
    """Code that comes with weights may differ from what the recipe follows."""
    vpm, resampler = models("2.6")
    vpm.embeddings.position_ids = lambda shape, mask, sizes: torch.zeros(shape, dtype=torch.long)
    encoder = vg.recipes.minicpmv(vpm, resampler, BUDGETS, backend="tape")
    with pytest.warns(UserWarning, match="2 of 2 graphs failed verification"):
        output = encoder(patches((SIZES,)), tgt_sizes=SIZES)
    assert distance(output, original(vpm, resampler, slices_of(SIZES), SIZES)) < 1e-5


@pytest.mark.parametrize("version", VERSIONS)
def test_hooks_and_training_run_the_modules_themselves(version):
    vpm, resampler = models(version)
    layout = (SIZES, TIMES) if version == "4.5" else (SIZES,)
    expected = original(vpm, resampler, slices_of(SIZES), *layout)
    encoder = vg.recipes.minicpmv(vpm, resampler, BUDGETS, backend="tape", verify=UNVERIFIED)
    seen = []
    hook = vpm.register_forward_hook(lambda *_: seen.append(1))
    assert distance(encoder(patches(layout), **arguments(layout)), expected) < 1e-5
    assert len(seen) == len(SIZES)
    hook.remove()
    vpm.train()
    with torch.enable_grad():
        output = encoder(patches(layout), **arguments(layout))
        output.sum().backward()
    assert distance(output.detach(), expected) < 1e-5
    assert resampler.proj.grad is not None
    assert vpm.embeddings.position_embedding.weight.grad is not None


def test_the_form_of_the_resampler_that_mixes_up_slices_is_refused():
    vpm, _ = models("4.5")
    resampler = Resampler45(batch_infer=False).eval()
    for make in (lambda: vg.recipes.minicpmv(vpm, resampler), lambda: vg.recipes.resampler(resampler)):
        with pytest.raises(
            vg.errors.SpecError, match=r"batch_3d_resampler=False.* set model.resampler.batch_infer = True"
        ):
            make()
    resampler.batch_infer = True
    encoder = vg.recipes.minicpmv(vpm, resampler, BUDGETS, backend="tape", verify=UNVERIFIED)
    encoder(patches((SIZES,)), tgt_sizes=SIZES)
    resampler.batch_infer = False
    with pytest.raises(
        vg.errors.StaleGraphError, match=re.escape("'resampler.batch_infer' changed from True to False")
    ):
        encoder.check()


def test_the_resampler_may_grow_its_table_of_positions():
    """As it does when its own code meets a larger slice: graphs compute positions without a table."""
    vpm, resampler = models("2.6")
    encoder = vg.recipes.minicpmv(vpm, resampler, ONE, backend="tape", verify=UNVERIFIED)
    expected = encoder(patches((SIZES,)), tgt_sizes=SIZES)
    original(vpm, resampler, slices_of([(1, 75)]), [(1, 75)])
    assert len(resampler.pos_embed) == 75
    encoder.check()
    assert equal_bits(encoder(patches((SIZES,)), tgt_sizes=SIZES), expected)


def features(layout, seed=0):
    rows = sum(h * w for h, w in layout[0])
    return torch.randn(rows, 48, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("module", [Resampler(), Resampler45()], ids=["2.6", "4.5"])
def test_the_resampler_alone_keeps_the_padding_contract(module):
    def padded(rows, layout):
        sizes, *times = layout
        x = nn.utils.rnn.pad_sequence(rows.split([h * w for h, w in sizes]), batch_first=True)
        with torch.no_grad():
            return module(x, torch.tensor(sizes), *times)

    encoder = vg.recipes.resampler(module.eval(), BUDGETS, backend="tape")
    layouts = [(sizes,) for sizes in LAYOUTS]
    if isinstance(module, Resampler45):
        layouts += [(SIZES, TIMES), ([(2, 3)] * 6, [[1, 2, 3, 4, 5, 6]])]
    check_padding_contract(encoder, padded, features, "tgt_sizes", layouts, 1e-5, more=arguments)
    assert distance(encoder(features((SIZES,)), SIZES), padded(features((SIZES,)), (SIZES,))) < 1e-5


def test_a_resampler_may_take_features_of_its_own_width():
    module = Resampler(vision_dim=64).eval()
    encoder = vg.recipes.resampler(module, BUDGETS, backend="tape")
    x = torch.randn(35, 64)
    with torch.no_grad():
        assert distance(encoder(x, tgt_sizes=[(5, 7)]), module(x[None], torch.tensor([[5, 7]]))) < 1e-5


@pytest.mark.parametrize(("version", "queries"), [("2.5", 96), ("2.6", 64), ("4.5", 64)])
def test_the_heads_of_real_models(version, queries):
    """72 channels a head in the one and 128 in the other, and slices of 448 x 448."""
    vision = {"dim": 144, "heads": 2, "hidden": 538, "depth": 1, "patch": 14}
    pair = models(version, 3, vision, {"queries": queries, "dim": 256, "heads": 2, "vision_dim": 144})
    sizes, times = [(32, 32), (23, 45)], [[4, 12]]
    slices = slices_of(sizes, patch=14)
    layout = (sizes, times) if version == "4.5" else (sizes,)
    encoder = vg.recipes.minicpmv(*pair, [vg.budgets.Budget(2112, items=3)], backend="tape", verify=UNVERIFIED)
    output = encoder(vg.recipes.pack_slices(slices), **arguments(layout))
    assert output.shape == (1 if version == "4.5" else 2, queries, 256)
    assert distance(output, original(*pair, slices, *layout)) < 1e-5


@pytest.mark.parametrize("version", VERSIONS)
def test_half_precision_is_as_close_to_float32_as_the_original(version):
    half = [module.bfloat16() for module in models(version)]
    exact = [module.bfloat16().float() for module in models(version)]
    layout = (SIZES, TIMES) if version == "4.5" else (SIZES,)
    slices = [one.bfloat16() for one in slices_of(SIZES)]
    expected = original(*exact, [one.float() for one in slices], *layout)
    encoder = vg.recipes.minicpmv(*half, ONE, backend="tape", verify=UNVERIFIED)
    output = encoder(vg.recipes.pack_slices(slices), **arguments(layout))
    check_half_precision(output, original(*half, slices, *layout), expected, torch.bfloat16)


@pytest.mark.parametrize(
    "path",
    [
        "embeddings.patch_embedding",
        "embeddings.position_embedding",
        "encoder.layers.0.self_attn.k_proj",
        "encoder.layers.1.mlp.fc1",
        "post_layernorm",
    ],
)
def test_adapters_are_called(path):
    vpm, resampler = models("2.6")
    adapt(vpm, path)
    encoder = vg.recipes.minicpmv(vpm, resampler, ONE, backend="tape", verify=UNVERIFIED)
    expected = original(vpm, resampler, slices_of(SIZES), SIZES)
    assert distance(encoder(patches((SIZES,)), tgt_sizes=SIZES), expected) < 1e-5


def test_the_modules_stay_as_they_are_and_weights_may_change_in_place():
    vpm, resampler = models("2.6")
    names = [*vpm.state_dict(), *resampler.state_dict()]
    encoder = vg.recipes.minicpmv(vpm, resampler, ONE, backend="tape", verify=UNVERIFIED)
    before = encoder(patches((SIZES,)), tgt_sizes=SIZES)
    with torch.no_grad():
        resampler.attn.in_proj_weight.mul_(0.5)
        vpm.embeddings.position_embedding.weight.mul_(2)
    after = encoder(patches((SIZES,)), tgt_sizes=SIZES)
    assert distance(after, before) > 1e-2
    assert distance(after, original(vpm, resampler, slices_of(SIZES), SIZES)) < 1e-5
    assert [*vpm.state_dict(), *resampler.state_dict()] == names


def test_slices_may_be_written_into_the_arena():
    encoder, rows = SHARED["4.5"], patches((SIZES,))
    with encoder.stage(SIZES, temporal_ids=TIMES) as stage:
        stage.rows.copy_(rows)
    assert equal_bits(stage.output, encoder(rows, tgt_sizes=SIZES, temporal_ids=TIMES))


def test_sizes_on_the_device_are_read_where_they_are():
    encoder = vg.recipes.minicpmv(*TOWERS["2.6"], [vg.budgets.Budget(384, items=6)], backend="tape", verify=UNVERIFIED)
    rows = patches((SIZES,))
    expected = padded_original("2.6")(rows, (SIZES,))
    assert distance(encoder(rows, torch.tensor(SIZES, dtype=torch.int32)), expected) < 1e-5
    encoder.check()


def test_the_default_budgets_have_room_for_slices_of_some_patches():
    budgets = vg.recipes.minicpmv(*TOWERS["2.6"], backend="tape").budgets
    assert [budget.rows for budget in budgets] == list(vg.Ladder().row_counts())
    assert (budgets[0].items, budgets[-1].items) == (4, 64)


def test_packed_slices_are_what_the_convolution_sees():
    (one,) = slices_of([(3, 5)])
    convolution = TOWERS["2.6"][0].embeddings.patch_embedding
    rows = vg.recipes.pack_slices([one])
    with torch.no_grad():
        expected = convolution(one[None]).flatten(2)[0].T
        torch.testing.assert_close(rows @ convolution.weight.flatten(1).T + convolution.bias, expected)
    assert torch.equal(unpacked(rows, [(3, 5)])[0], one)


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([], "slices is empty: expected at least one"),
        ([torch.zeros(3, 4, 9)], "slices[0] is [3, 4, 9]: expected [3, patch, patch * patches], of one patch size"),
        ([torch.zeros(3, 4, 8), torch.zeros(3, 2, 8)], "slices[1] is [3, 2, 8]: expected [3, patch"),
        ([torch.zeros(3, 8)], "slices[0] is [3, 8]: expected [3, patch"),
    ],
)
def test_other_slices_are_refused(slices, message):
    with pytest.raises(vg.errors.InputError, match=re.escape(message)):
        vg.recipes.pack_slices(slices)


def test_sizes_that_are_too_large_are_refused():
    with pytest.raises(
        vg.errors.LayoutError, match=re.escape("tgt_sizes[0] has a size of 1025, but buffer 'buckets' has")
    ):
        SHARED["2.6"](torch.zeros(1025, 48), tgt_sizes=[(1, 1025)])
    assert SHARED["2.5"].eager(torch.zeros(1200, 48), tgt_sizes=[(3, 400)]).shape == (1, 6, 64)
    with pytest.raises(
        vg.errors.LayoutError, match=re.escape("tgt_sizes[0] has a size of 2100, but buffer 'buckets' has")
    ):
        SHARED["2.5"](torch.zeros(2100, 48), tgt_sizes=[(3, 700)])


def test_positions_go_on_past_the_table_of_the_original():
    """Which grows its own when it meets such a slice."""
    layout = ([(1, 75)],)
    rows = patches(layout)
    assert distance(SHARED["2.6"](rows, tgt_sizes=layout[0]), padded_original("2.6")(rows, layout)) < 1e-5


def test_other_modules_are_refused():
    vpm, resampler = models("2.6")
    with pytest.raises(
        vg.errors.SpecError, match=r"Linear has no .*'embeddings'.* expected the vision transformer of MiniCPM-V"
    ):
        vg.recipes.minicpmv(nn.Linear(2, 2), resampler)
    with pytest.raises(vg.errors.SpecError, match=r"Linear has no .*'query'.* expected the resampler of MiniCPM-V"):
        vg.recipes.minicpmv(vpm, nn.Linear(2, 2))
    resampler.attn.in_proj_bias = None
    with pytest.raises(vg.errors.SpecError, match="expected a plain attention"):
        vg.recipes.resampler(resampler)
    resampler.attn = Adapted(nn.Linear(2, 2))
    with pytest.raises(vg.errors.SpecError, match=r"Adapted has no .*'in_proj_weight'"):
        vg.recipes.resampler(resampler)
    vpm.forward = lambda *args, **kwargs: None
    with pytest.raises(vg.errors.SpecError, match=re.escape("expected tgt_sizes, or patch_attention_mask")):
        vg.recipes.minicpmv(vpm, models("2.6")[1])


def test_wrong_sizes_get_named_errors():
    rows = patches((SIZES,))
    with pytest.raises(vg.errors.LayoutError, match=re.escape("tgt_sizes describes 1 item of 35 rows in all")):
        SHARED["2.6"](rows, tgt_sizes=SIZES[:1])
    with pytest.raises(vg.errors.InputError, match=re.escape("'temporal_ids'")):
        SHARED["2.6"](rows, tgt_sizes=SIZES, temporal_ids=TIMES)
    with pytest.raises(
        vg.errors.LayoutError, match=re.escape("temporal_ids is [-1, 3]: expected one integer for each of 5")
    ):
        SHARED["4.5"](rows, tgt_sizes=numpy.array(SIZES), temporal_ids=[[-1], [3]])
    with pytest.raises(
        vg.errors.LayoutError, match=re.escape("temporal_ids has -2: expected times of at least 0, or -1 for")
    ):
        SHARED["4.5"](rows, tgt_sizes=SIZES, temporal_ids=[[-1], [3, -2, 5, 6]])
