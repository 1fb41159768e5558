"""`use_attention`: one thread runs a model with our attention, and no other thread sees anything of it."""

import copy
import gc
import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import varlen_graphs as vg
from tests.support.towers import distance, pixels, qwen3_vl_tower

transformers = pytest.importorskip("transformers", reason="needs transformers")

from varlen_graphs.attention.transformers import use_attention  # noqa: E402

GRID = [(1, 4, 4), (1, 8, 4), (2, 4, 4)]


def run(tower, grid=GRID):
    with torch.no_grad():
        return tower(pixels(grid), grid_thw=torch.tensor(grid))


def in_another_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_other_threads_keep_the_attention_of_the_model(name):
    tower = qwen3_vl_tower()
    tower.config._attn_implementation = name
    before, expected = vars(tower.config).copy(), run(tower)
    with use_attention(tower):
        ours = tower.config._attn_implementation
        assert in_another_thread(lambda: tower.config._attn_implementation) == name
        assert distance(in_another_thread(lambda: run(tower)), expected) == 0
        assert vars(tower.config) == before
        for copied in (copy.deepcopy(tower.config), pickle.loads(pickle.dumps(tower.config))):
            assert copied._attn_implementation == name
        assert ours not in json.dumps(tower.config.to_dict())
        assert distance(run(tower), expected) < 1e-5
    assert tower.config._attn_implementation == name


def test_blocks_nest_and_end_with_errors():
    first, second = qwen3_vl_tower(), qwen3_vl_tower()
    before = first.config._attn_implementation
    with use_attention(first), use_attention(second):
        assert first.config._attn_implementation == second.config._attn_implementation != before
    with pytest.raises(ZeroDivisionError), use_attention(first):
        _ = 1 / 0
    assert first.config._attn_implementation == second.config._attn_implementation == before
    with use_attention(first):
        assert second.config._attn_implementation == before


def test_an_attention_that_is_set_is_the_one_after_the_block():
    tower = qwen3_vl_tower()
    with use_attention(tower):
        in_another_thread(lambda: setattr(tower.config, "_attn_implementation", "eager"))
    assert tower.config._attn_implementation == "eager"


def test_threads_that_enter_and_leave_leave_nothing_behind():
    tower = qwen3_vl_tower()
    before, expected = tower.config._attn_implementation, run(tower)
    barrier = threading.Barrier(4)

    def work(ours):
        for _ in range(5):
            barrier.wait()
            if ours:
                with use_attention(tower):
                    got = run(tower)
            else:
                assert tower.config._attn_implementation == before
                got = run(tower)
            assert distance(got, expected) < (1e-5 if ours else 1e-12)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, [True, True, False, False]))
    assert tower.config._attn_implementation == before


def test_the_generic_recipe_changes_nothing_for_other_threads():
    tower = qwen3_vl_tower()
    before, expected = vars(tower.config).copy(), run(tower)
    encoder = vg.recipes.generic(tower, budgets=[128], backend="tape")
    name, stop, seen = tower.config._attn_implementation, threading.Event(), set()

    def watch():
        while not stop.is_set():
            seen.add(tower.config._attn_implementation)
            assert distance(run(tower), expected) == 0

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            encoder.capture()
            assert distance(encoder(pixels(GRID), grid_thw=GRID), expected) < 1e-5
            assert distance(encoder.eager(pixels(GRID), grid_thw=GRID), expected) < 1e-5
        finally:
            stop.set()
        watching.result()
    assert seen == {name}
    assert vars(tower.config) == before


def test_the_class_of_the_config_is_as_before_after_the_last_encoder():
    shared = type(qwen3_vl_tower().config)  # which encoders of other tests may have in use
    own = {name: value for name, value in vars(shared).items() if name not in ("__dict__", "__weakref__")}
    own.pop("_attn_implementation", None)
    Config = type("Config", shared.__bases__, own)  # noqa: N806

    def tower():
        made = qwen3_vl_tower()
        made.config.__class__ = Config
        return made

    first, second = tower(), tower()
    before, inherited = vars(Config).copy(), Config._attn_implementation
    encoders = [vg.recipes.generic(one, budgets=[128], backend="tape") for one in (first, second)]
    for encoder in encoders:
        assert distance(encoder(pixels(GRID), grid_thw=GRID), run(encoder.module)) < 1e-5
    del encoder, encoders[0]
    gc.collect()
    assert distance(encoders[0](pixels(GRID), grid_thw=GRID), run(second)) < 1e-5
    assert Config._attn_implementation is not inherited
    encoders.clear()
    gc.collect()
    assert vars(Config).keys() == before.keys()
    assert Config._attn_implementation is inherited
    with use_attention(first):
        pass
    assert Config._attn_implementation is not inherited  # for the next block
    del first
    gc.collect()
    assert Config._attn_implementation is inherited


def test_a_class_with_a_property_of_its_own_gets_it_back():
    class Config(type(qwen3_vl_tower().config)):
        _attn_implementation = property(lambda config: "sdpa", lambda config, name: None)

    own, tower = Config._attn_implementation, qwen3_vl_tower()
    tower.config.__class__ = Config
    with use_attention(tower):
        assert Config._attn_implementation is not own
    del tower
    gc.collect()
    assert Config._attn_implementation is own


def test_a_property_that_others_have_replaced_since_stays():
    class Config(type(qwen3_vl_tower().config)):
        pass

    tower = qwen3_vl_tower()
    tower.config.__class__ = Config
    with use_attention(tower):
        pass
    Config._attn_implementation = others = property(Config._attn_implementation.fget)
    del tower
    gc.collect()
    assert Config._attn_implementation is others


def test_encoders_that_come_and_go_in_threads_leave_the_class_as_before():
    class Config(type(qwen3_vl_tower().config)):
        pass

    inherited = Config._attn_implementation

    def work(_):
        tower = qwen3_vl_tower()
        tower.config.__class__ = Config
        expected = run(tower)
        for _ in range(3):
            with use_attention(tower):
                ours = tower.config._attn_implementation
                assert distance(run(tower), expected) < 1e-5
            assert tower.config._attn_implementation != ours

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(12)))
    gc.collect()
    assert Config._attn_implementation is inherited


def test_compiled_code_uses_the_attention_of_its_block():
    tower = qwen3_vl_tower()
    expected = run(tower)
    names = []

    @torch.compile(backend="eager", fullgraph=True)
    def named(config, x):
        return x + 1 if config._attn_implementation == names[0] else x

    with use_attention(tower):
        names.append(tower.config._attn_implementation)
    assert named(tower.config, torch.zeros(1)) == 0
    torch.compiler.reset()
    with use_attention(tower):
        assert named(tower.config, torch.zeros(1)) == 1
    assert distance(run(tower), expected) == 0


@pytest.mark.parametrize("sliding_window", [None, 3])
@pytest.mark.parametrize(("argument", "attribute"), [(None, True), (None, False), (True, False), (False, True)])
def test_causality_and_windows_are_those_of_the_models_own_flash_attention(sliding_window, argument, attribute):
    from varlen_graphs.attention.transformers import flash_attention

    module = torch.nn.Identity()
    module.is_causal = attribute
    q, k, v = torch.randn(3, 1, 2, 12, 8)
    starts = torch.tensor([0, 7, 12], dtype=torch.int32)
    out, _ = flash_attention(
        module, q, k, v, cu_seq_lens_q=starts, max_length_q=7, sliding_window=sliding_window, is_causal=argument
    )
    row = torch.arange(12)
    after = row - row[:, None]
    mask = (row < 7) == (row < 7)[:, None]
    if attribute if argument is None else argument:
        mask &= after <= 0
    if sliding_window:
        mask &= after.abs() < sliding_window
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)
    torch.testing.assert_close(out, expected)


def test_biases_of_a_model_are_refused_and_not_left_out():
    config = transformers.T5Config(vocab_size=99, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2)
    model = transformers.T5EncoderModel(config).eval()
    if not hasattr(transformers.models.t5.modeling_t5, "eager_attention_forward"):
        pytest.skip("T5 computes its attention itself")
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
    with use_attention(model), pytest.raises(vg.errors.InputError, match=r"\['position_bias'\] unsupported options"):
        model(torch.ones(1, 8, dtype=torch.int64), cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, max_length_q=8)
