"""Wrapped towers with a part in training mode: their calls run eager, are counted from the first, and come back."""

import copy
import threading

import pytest
import torch
from torch import nn

import varlen_graphs as vg

transformers = pytest.importorskip("transformers", minversion="5.0")

from tests.support.encoders import UNVERIFIED  # noqa: E402
from tests.support.towers import distance, pixels, pooled, qwen3_vl_tower  # noqa: E402

SIZES = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
}  # fmt: skip
MASK = (torch.arange(9) < torch.tensor([9, 3])[:, None]).long()
IDS = torch.randint(3, 97, MASK.shape, generator=torch.Generator().manual_seed(0)) * MASK
GRID = torch.tensor([(1, 4, 6), (1, 4, 4)])
EAGER = "training mode differs from construction"


def texts():
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(**SIZES)).eval().requires_grad_(False), [64]


def images():
    return qwen3_vl_tower().requires_grad_(False), [vg.budgets.Budget(128, items=4)]


def run(model):
    if isinstance(model, transformers.BertModel):
        return model(input_ids=IDS, attention_mask=MASK).last_hidden_state * MASK[..., None]
    return pooled(model(pixels(GRID.tolist()), grid_thw=GRID))


def lora(model, **options):
    peft = pytest.importorskip("peft", reason="needs peft")
    targets = ["query"] if isinstance(model, transformers.BertModel) else ["qkv"]
    return peft, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **options)


def adapter(model):
    torch.manual_seed(1)
    config = lora(model)[1]
    try:
        model.add_adapter(config)
    except ValueError as error:  # transformers 5.24 wants a later peft
        if "version of PEFT" not in str(error):
            raise
        pytest.skip(str(error))


def injected(model):
    torch.manual_seed(1)
    peft, config = lora(model, lora_dropout=0.5)
    peft.inject_adapter_in_model(config, model)


def hotswap(model):
    adapter(model)
    from peft.utils.hotswap import prepare_model_for_compiled_hotswap

    prepare_model_for_compiled_hotswap(model, target_rank=8)


def head(model):
    model.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(32, 2))


@pytest.mark.parametrize("make", [texts, images])
@pytest.mark.parametrize(
    ("change", "reads"), [(adapter, False), (adapter, True), (injected, True), (hotswap, False), (head, True)]
)
def test_calls_are_counted_and_evaluation_leads_back_to_graphs(make, change, reads):
    model, budgets = make()
    vg.wrap(model, budgets, backend="tape", verify=UNVERIFIED)
    change(model)
    plain = vg.unwrap(copy.deepcopy(model))
    for calls in (1, 2):
        if reads:
            vg.encoders(model).report()
        torch.manual_seed(2)
        if calls == 1 and not (reads and make is images):
            with pytest.warns(
                UserWarning, match=r" inside of .* is in training mode, so that calls run eager; call mod"
            ):
                got = run(model)
        else:
            got = run(model)
        torch.manual_seed(2)
        assert torch.equal(got, run(plain))
    found = vg.encoders(model)
    assert found.stats[""].eager == {EAGER: 2}
    assert found.stats[""].calls == 2
    assert EAGER in found.report()
    if make is texts:  # found by running it, which its dropout disturbs
        assert not found
        assert " inside of " in found.eager[""]
    model.eval()
    assert distance(run(model), run(plain.eval())) < 1e-5
    encoder = vg.encoders(model)[""]
    assert encoder.stats.replays.total() == 1
    assert encoder.stats.calls == 3
    assert encoder.stats.eager == vg.encoders(model).stats[""].eager == {EAGER: 2}


def test_a_layer_that_is_the_same_in_training_is_no_reason():
    model, budgets = texts()
    model.head = nn.Linear(32, 2)
    run(vg.wrap(model, budgets, backend="tape"))
    assert vg.encoders(model)[""].stats.replays.total() == 1


@pytest.mark.parametrize("make", [texts, images])
def test_calls_of_all_threads_are_counted_while_one_makes_the_encoder(make):
    model, budgets = make()
    expected = run(model)
    vg.wrap(model, budgets, backend="tape")
    start, outputs = threading.Barrier(8), []

    def call():
        with torch.no_grad():
            start.wait()
            outputs.append(run(model))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(distance(output, expected) for output in outputs) < 1e-5
    stats = vg.encoders(model)[""].stats
    assert stats.calls == len(outputs) == 8
    assert stats.replays.total() + stats.eager.total() == 8


@pytest.mark.parametrize("make", [texts, images])
def test_runs_of_an_encoder_that_another_thread_has_made_are_no_calls(make):
    model, budgets = make()
    vg.wrap(model, budgets, backend="tape")
    thread = threading.Thread(target=vg.encoders, args=(model,))
    thread.start()
    thread.join()
    with torch.no_grad():
        run(model)
    stats = vg.encoders(model)[""].stats
    assert (stats.calls, stats.replays.total(), stats.eager.total()) == (1, 1, 0)


def test_what_was_captured_in_training_mode_is_captured_again_in_evaluation():
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.9)).requires_grad_(False)
    spec = vg.BufferSpec("input", vg.Lengths())
    encoder = vg.GraphedEncoder(module, [64], spec, backend="tape", verify=vg.options.Verify(at_capture=False))
    rows = torch.randn(10, 8)
    with pytest.warns(UserWarning, match="captured in training mode"):
        encoder(rows, lengths=[6, 4])
    module.eval()
    assert distance(encoder(rows, lengths=[6, 4]), module(rows)) < 1e-5
    module[1].train()
    encoder(rows, lengths=[6, 4])
    assert encoder.stats.replays.total() == 2
    assert encoder.stats.eager == {"training mode differs from construction": 1}
