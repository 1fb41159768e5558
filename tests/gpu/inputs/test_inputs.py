"""Tensors beside the rows on real CUDA graphs."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.gpu import on_gpus
from tests.support.inputs import BUDGETS, SPECS, Mixed, call_of, check_inputs_contract, expected
from tests.support.towers import distance, equal_bits

pytestmark = on_gpus()


def encoder_for(kind, **options):
    return vg.GraphedEncoder(Mixed().eval().cuda(), BUDGETS[kind], SPECS[kind], **options)


@pytest.mark.parametrize("kind", SPECS)
def test_the_padding_contract_holds(kind):
    check_inputs_contract(encoder_for(kind, verify=vg.options.Verify(strict=True)), kind, "cuda")


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("where", ["numbers", "cpu", "pinned"])
def test_what_belongs_to_items_and_calls_may_come_from_the_host(kind, where):
    encoder, lengths = encoder_for(kind), [20, 30, 9]
    call = call_of(kind, lengths, device="cuda", numbers=where == "numbers")
    want = expected(encoder.module, kind, call, lengths)
    if where != "numbers":
        call |= {name: call[name].cpu() for name in ("t", "label", "scale", "prompt")}
    if where == "pinned":
        call |= {name: call[name].pin_memory() for name in ("t", "label", "scale", "prompt")}
    encoder(**call)
    got = encoder(**call)
    if where == "pinned":  # their owner may write the next values at once
        for name in ("t", "prompt"):
            call[name].fill_(torch.nan)
    assert distance(got, want) < 1e-5


def test_items_that_only_the_gpu_knows_cost_no_sync():
    encoder, lengths = encoder_for("packed").capture(), [5, 9]
    call = call_of("packed", lengths, device="cuda") | {"lengths": torch.tensor(lengths, device="cuda")}
    encoder(**call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = encoder(**call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert distance(got, expected(encoder.module, "packed", call, lengths)) < 1e-5


def test_split_calls_and_stages():
    encoder, lengths = encoder_for("packed"), [60, 50, 3, 40, 100, 7]
    call = call_of("packed", lengths, device="cuda")
    assert distance(encoder(**call), expected(encoder.module, "packed", call, lengths)) < 1e-5
    lengths = [5, 9]
    call = call_of("packed", lengths, device="cuda")
    want, rows, layout = encoder(**call), call.pop("ids"), call.pop("lengths")
    with encoder.stage(layout, **call) as stage:
        stage.rows.copy_(rows)
    assert equal_bits(stage.output, want)
