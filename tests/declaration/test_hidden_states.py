"""`output_hidden_states`: what asks for hidden states is a static argument, and graphs return those declared."""

import threading

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.batches import images
from tests.support.contract import check_padding_contract
from tests.support.encoders import UNVERIFIED, rows_for
from tests.support.hidden_states import (
    FIELDS,
    Layers,
    bert,
    bert_encoder,
    layers_encoder,
    original_layers,
    real_rows,
    texts,
    tower_encoder,
    tower_of,
)
from tests.support.towers import distance, equal_bits, original_of, pixels, qwen2_tower
from varlen_graphs.graphs.store import MOST_SETS, TOO_MANY_SETS

LAYOUTS = [[128], [1], [30, 2, 40], [5, 5]]
CALLS = [{}, {"output_hidden_states": True}, {"output_hidden_states": False}, {"output_hidden_states": None}]
TOWERS = ["CLIPVision", "ViT"]
ASKS = {"output_hidden_states": True}


def sets(encoder):
    return len(encoder.executor.store.sets)


# Packed rows


@pytest.mark.parametrize("declared", [None, vg.outputs.Rows(), FIELDS | {"hidden_states": [vg.outputs.Rows()] * 4}])
def test_the_padding_contract_holds_for_all_layers(declared):
    module = Layers()
    encoder = layers_encoder(module, declared)
    asking = original_layers(module, **ASKS)
    check_padding_contract(encoder, asking, rows_for, "lengths", LAYOUTS, 1e-5, lambda layout: ASKS)
    check_padding_contract(encoder, original_layers(module), rows_for, "lengths", LAYOUTS, 1e-5)
    assert sets(encoder) == 2
    assert "\n  output_hidden_states=True\n" in encoder.report()


def test_a_field_is_absent_where_a_call_does_not_ask():
    encoder, rows = layers_encoder(), rows_for([6, 3])
    assert [*encoder(rows, lengths=[6, 3])] == ["last_hidden_state"]
    assert [*encoder(rows, lengths=[6, 3], **ASKS)] == ["last_hidden_state", "hidden_states"]
    assert [*encoder(rows, lengths=[6, 3], output_hidden_states=False)] == ["last_hidden_state"]


def test_no_other_field_may_be_absent():
    with pytest.raises(vg.errors.SpecError, match=r"declared but absent: \['hiden_states'\]"):
        layers_encoder(
            outputs=vg.outputs.Fields(last_hidden_state=vg.outputs.Rows(), hiden_states=vg.outputs.Rows())
        ).capture()
    encoder = layers_encoder(
        outputs=vg.outputs.Fields(last_hidden_states=vg.outputs.Rows(), hidden_states=vg.outputs.Rows())
    )
    for asked in ({}, ASKS):
        with pytest.raises(
            vg.errors.SpecError, match=r"undeclared: \['last_hidden_state'\]; declared but absent: \['last_h"
        ):
            encoder(rows_for([6]), lengths=[6], **asked)


def test_layers_declared_one_by_one_must_be_as_many():
    encoder = layers_encoder(outputs=FIELDS | {"hidden_states": [vg.outputs.Rows()] * 3})
    encoder(rows_for([6]), lengths=[6])
    with pytest.raises(vg.errors.SpecError, match=r"output.hidden_states has 4 parts but is declared as \[Rows"):
        encoder(rows_for([6]), lengths=[6], **ASKS)


def test_undeclared_hidden_states_and_attentions_run_eager():
    module, rows = Layers(), rows_for([6])
    encoder = layers_encoder(module, vg.outputs.Fields(last_hidden_state=vg.outputs.Rows()))
    assert distance(encoder(rows, lengths=[6], **ASKS), original_layers(module, **ASKS)(rows, [6])) == 0
    encoder = layers_encoder(module)
    both = ASKS | {"output_attentions": True}
    assert distance(encoder(rows, lengths=[6], **both), original_layers(module, **both)(rows, [6])) == 0
    assert encoder.stats.eager == {"output_attentions=True": 1}
    assert not encoder.stats.replays


def test_other_ways_to_call_return_the_same():
    module, lengths = Layers(), [6, 30]
    encoder, rows = layers_encoder(module), rows_for(lengths)
    expected = encoder(rows, lengths=lengths, **ASKS)
    assert distance(expected, original_layers(module, **ASKS)(rows, lengths)) < 1e-5
    with encoder.stage(lengths, **ASKS) as stage:
        stage.rows.copy_(rows)
    assert equal_bits(stage.output, expected)
    assert equal_bits(encoder(rows, lengths=torch.tensor(lengths), **ASKS), expected)
    many = [100, 60, 128]  # two replays and more
    assert (
        distance(encoder(rows_for(many), lengths=many, **ASKS), original_layers(module, **ASKS)(rows_for(many), many))
        < 1e-5
    )
    large = rows_for([300])  # no budget holds it
    assert distance(encoder(large, lengths=[300], **ASKS), original_layers(module, **ASKS)(large, [300])) < 1e-5
    assert encoder.verify([{"x": rows, "lengths": lengths, **ASKS}])
    assert encoder.stats.eager == {"larger than every budget": 1}


def test_they_are_verified_in_service():
    encoder = layers_encoder(verify=2).capture(**ASKS)
    for seed in range(3):
        encoder(rows_for([6], seed), lengths=[6], **ASKS)
    assert sets(encoder) == 1
    assert not encoder.stats.eager


def test_a_lazy_encoder_captures_them_when_calls_request_them_or_the_last_run_used_them(tmp_path):
    path = tmp_path / "warm.json"
    for requested in (True, False):
        warmup = None if requested else path
        encoder = layers_encoder(capture=vg.options.Capture(lazy=True, warmup=warmup))
        if requested:
            encoder(rows_for([6]), lengths=[6], **ASKS)
        assert encoder.capture_pending(None)
        assert len(encoder(rows_for([6]), lengths=[6], **ASKS)["hidden_states"]) == 4
        assert encoder.stats.replays.total() == sets(encoder) == 1
        encoder.save_warmup(path)


def test_layers_count_towards_the_limit_of_sets():
    encoder, rows = layers_encoder(Layers(1), budgets=[64], verify=UNVERIFIED), rows_for([6])
    for layer in range(1, MOST_SETS + 1):
        encoder(rows, lengths=[6], output_hidden_states=layer)
    with pytest.warns(UserWarning, match="output_hidden_states=17, after 16 other values"):
        encoder(rows, lengths=[6], output_hidden_states=17)
    assert encoder.stats.eager == {TOO_MANY_SETS: 1}


# A function in the place of the module


def pass_on(module, x, cu_seqlens, max_seqlen, output_hidden_states=None):
    return module(x, cu_seqlens, max_seqlen, output_hidden_states)


def test_a_function_returns_them_if_they_are_named():
    module, rows = Layers(), rows_for([6])
    encoder = layers_encoder(module, forward=pass_on)
    expected = original_layers(module, **ASKS)(rows, [6])
    assert distance(encoder(rows, lengths=[6], **ASKS), expected) < 1e-5
    assert not encoder.stats.eager
    one_extent = layers_encoder(module, vg.outputs.Rows(), forward=pass_on)
    assert distance(one_extent(rows, lengths=[6], **ASKS), expected) < 1e-5
    assert one_extent.stats.eager == {"output_hidden_states=True": 1}


def test_a_function_that_does_not_return_what_it_is_asked_for_is_refused():
    def forward(module, x, cu_seqlens, max_seqlen, **others):
        return module(x, cu_seqlens, max_seqlen)

    encoder = layers_encoder(forward=forward)
    encoder(rows_for([6]), lengths=[6])
    with pytest.raises(vg.errors.SpecError, match="got output_hidden_states=, but its output has no 'hidden_states'"):
        encoder(rows_for([6]), lengths=[6], **ASKS)


def test_a_function_that_returns_fewer_layers_than_the_module_is_not_used():
    class Padded(Layers):  # takes the arguments of the encoder
        def forward(self, x, lengths, output_hidden_states=None):
            cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
            return super().forward(x, cu_seqlens, int(lengths.max()), output_hidden_states)

    def forward(module, x, cu_seqlens, max_seqlen, output_hidden_states=None):
        output = Layers.forward(module, x, cu_seqlens, max_seqlen, output_hidden_states)
        return output | ({"hidden_states": output["hidden_states"][:-1]} if output_hidden_states else {})

    encoder, rows, lengths = layers_encoder(Padded(), forward=forward), rows_for([6]), torch.tensor([6])
    encoder(rows, lengths=lengths)
    with pytest.warns(UserWarning, match=r"output.hidden_states\[2\] of item ., .* differs by inf from the module its"):
        output = encoder(rows, lengths=lengths, **ASKS)
    assert len(output["hidden_states"]) == 4
    assert encoder.stats.eager == {"its budget failed verification": 1}


def test_the_index_of_a_layer_is_a_static_argument():
    def forward(module, x, cu_seqlens, max_seqlen, vision_feature_layer=-1):
        return module(x, cu_seqlens, max_seqlen, **ASKS)["hidden_states"][vision_feature_layer]

    module, rows = Layers(), rows_for([6, 3])
    encoder = layers_encoder(module, vg.outputs.Rows(), forward=forward)
    states = original_layers(module, **ASKS)(rows, [6, 3])["hidden_states"]
    for layer in (-1, -2, 0):
        assert distance(encoder(rows, lengths=[6, 3], vision_feature_layer=layer), states[layer]) < 1e-5
    assert sets(encoder) == 3
    assert not encoder.stats.eager


# Towers and text encoders of transformers


@pytest.mark.parametrize("declared", [None, vg.outputs.Rows()])
@pytest.mark.parametrize("family", TOWERS)
def test_a_caller_like_llava_selects_a_layer(family, declared):
    tower = tower_of(family)
    encoder = tower_encoder(tower, declared, budgets=[2, 8], backend="tape", verify=UNVERIFIED)

    def select(tower, pixel_values, **others):
        states = tower(pixel_values, output_hidden_states=True, **others).hidden_states
        return states[-2][:, 1:]

    for seed, count in enumerate((7, 1, 3, 8, 2, 20)):
        x = images(count, 16, seed)
        output = encoder(x, **ASKS)
        assert type(output) is type(tower(x, **ASKS))
        encoder.poison()
        over_nan = encoder(x, **ASKS)
        assert equal_bits(output, over_nan)
        assert distance(over_nan, tower(x, **ASKS)) < 1e-5
        assert distance(select(encoder, x), select(tower, x)) < 1e-5
        assert distance(select(encoder, x, return_dict=True), select(tower, x)) < 1e-5
        assert distance(encoder(x), tower(x)) < 1e-5
    assert not encoder.stats.eager


def test_layers_that_a_call_selects_are_a_static_argument():
    tower, x = tower_of(), images(3, 16)
    if len([state for state in tower(x, output_hidden_states=-2).hidden_states if state is not None]) > 1:
        pytest.skip("this transformers returns all layers or none")
    encoder = tower_encoder(tower, budgets=[4], backend="tape", verify=UNVERIFIED)
    for layers in (-2, 1, [0, -2], (0, -2)):
        output, expected = encoder(x, output_hidden_states=layers), tower(x, output_hidden_states=layers)
        assert [state is None for state in output.hidden_states] == [state is None for state in expected.hidden_states]
        assert distance(output, expected) < 1e-5
    assert not encoder.stats.eager
    assert sets(encoder) == 3


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("family", TOWERS)
def test_the_configuration_asks_unless_the_call_overrides_it(family, asks):
    tower, x = tower_of(family), images(3, 16)
    encoder = tower_encoder(tower, budgets=[4], backend="tape", verify=UNVERIFIED)
    for setting in (asks, not asks, asks):
        tower.config.output_hidden_states = setting
        for call in CALLS:
            output, expected = encoder(x, **call), tower(x, **call)
            assert distance(output, expected) < 1e-5
            assert len(output) == len(expected)
    encoder.check()
    assert not encoder.stats.eager


def test_the_configuration_is_asked_for_a_function_too():
    model, forward = bert()
    ids, mask = texts([5, 9])
    encoder = bert_encoder(model, forward, [vg.budgets.Budget.padded(2, 16)], backend="tape")
    assert "hidden_states" not in encoder(ids, attention_mask=mask)
    model.config.output_hidden_states = True
    assert len(encoder(ids, attention_mask=mask).hidden_states) == 4
    assert "hidden_states" not in encoder(ids, attention_mask=mask, output_hidden_states=False)
    undeclared = vg.BufferSpec(
        encoder.spec.rows, encoder.spec.layout, encoder.spec.buffers,
        {"last_hidden_state": vg.outputs.Rows(), "pooler_output": vg.outputs.Items()},
    )  # fmt: skip
    other = vg.GraphedEncoder(model, encoder.budgets, undeclared, forward=forward, backend="tape")
    assert len(other(ids, attention_mask=mask).hidden_states) == 4
    assert other.stats.eager == {"config.output_hidden_states=True": 1}
    assert not encoder.stats.eager


def test_a_padded_text_encoder_returns_the_layers_of_real_rows():
    model, forward = bert()
    budgets = [vg.budgets.Budget.padded(items, length) for items in (2, 4) for length in (32, 64)]
    encoder = bert_encoder(model, forward, budgets, backend="tape").capture(**ASKS)
    for lengths in ([64, 64, 64, 64], [1], [17, 60, 5], [33, 2]):
        ids, mask = texts(lengths)
        encoder.poison()
        output = encoder(ids, attention_mask=mask, **ASKS)
        assert distance(dict(output), real_rows(model(ids, mask[:, None, None].bool(), **ASKS), mask)) < 1e-5
        encoder(*texts([64, 64, 64, 64])[:1], attention_mask=texts([64, 64, 64, 64])[1], **ASKS)
        assert equal_bits(encoder(ids, attention_mask=mask, **ASKS), output)
    assert not encoder.stats.eager


def test_a_packed_tower_of_transformers_returns_its_layers():
    pytest.importorskip("transformers.vision_utils", reason="towers of transformers 4.57 take no buffers")
    from varlen_graphs.attention.transformers import use_attention

    tower = qwen2_tower(family="qwen2_vl")

    def forward(tower, **arguments):
        with use_attention(tower):
            return tower(**arguments)

    spec = vg.BufferSpec(
        rows="hidden_states",
        layout=vg.GridTHW(merge=2),
        buffers=[
            vg.buffers.CuSeqlens(per="frame"),
            vg.buffers.MaxSeqlen(per="frame"),
            vg.buffers.GridPositions("position_ids", order="merge_block"),
        ],
        outputs=vg.outputs.Fields(**FIELDS, pooler_output=vg.outputs.Rows(every=4)),
    )
    encoder = vg.GraphedEncoder(tower, [vg.budgets.Budget(256, segments=24)], spec, forward=forward, backend="tape")
    grid = [(1, 6, 10), (5, 4, 6)]
    encoder(pixels(grid), grid_thw=grid)
    for layout in ([(1, 16, 16)], [(1, 2, 2)], grid):
        rows = pixels(layout)
        with torch.no_grad():
            expected = tower(rows, grid_thw=torch.tensor(layout), **ASKS)
        assert distance(encoder(rows, grid_thw=layout, **ASKS), expected) < 1e-5
        encoder.poison()
    assert distance(encoder(rows, grid_thw=layout), original_of(tower)(rows, layout)) < 1e-5
    assert not encoder.stats.eager


# What transformers leaves on modules to collect them


class Caching(nn.Module):
    """Changes something in its first run, which a capture undoes."""

    def __init__(self, tower):
        super().__init__()
        self.tower = tower
        self.scale = None

    def forward(self, pixel_values, **others):
        if self.scale is None:
            self.scale = torch.ones(())
        return self.tower(pixel_values * self.scale, **others)


@pytest.mark.parametrize("wrap", [lambda tower: tower, Caching])
@pytest.mark.parametrize("family", TOWERS)
def test_a_capture_leaves_modules_that_record_each_layer_once(family, wrap):
    tower, x = tower_of(family), images(3, 16)
    encoder = tower_encoder(wrap(tower).eval(), budgets=[4], backend="tape", verify=UNVERIFIED)
    assert len(encoder(x, **ASKS).hidden_states) == len(tower(x, **ASKS).hidden_states) == 4
    encoder(x)
    encoder.check()
    assert not encoder.stats.eager


def test_the_forward_of_its_class_is_no_replaced_forward():
    """Transformers 4.57 leaves it on layers whose output it has recorded."""
    module, rows = Layers(), rows_for([6])
    encoder = layers_encoder(module)
    encoder(rows, lengths=[6])
    module.layers[0].forward = module.layers[0].forward
    encoder.check()
    module.layers[0].forward = lambda *arguments: rows
    with pytest.raises(vg.errors.StaleGraphError, match=r"the forward of 'layers\.0' was replaced"):
        encoder.check()


def test_threads_that_ask_transformers_5_for_hidden_states_disturb_no_capture():
    pytest.importorskip("transformers", minversion="5.0")
    tower, x, done = tower_of(), images(3, 16), threading.Event()
    found = []

    def ask():
        while not done.is_set():
            found.append(len(tower(x, **ASKS).hidden_states))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for seed in range(3):
            output = tower_encoder(tower, budgets=[8], backend="tape")(images(5, 16, seed), **ASKS)
            assert distance(output, tower(images(5, 16, seed), **ASKS)) < 1e-5
    finally:
        done.set()
        thread.join()
    assert {*found} == {4}
