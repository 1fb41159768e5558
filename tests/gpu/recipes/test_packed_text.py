"""Text encoders of transformers on real CUDA graphs."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import varlen_graphs as vg
from tests.support.contract import check_half_precision
from tests.support.gpu import on_gpus
from tests.support.text_encoders import (
    LENGTHS,
    PACKED,
    PADDED,
    REFUSED,
    check_texts,
    error_of,
    text_encoder,
    text_model,
    texts,
)

pytestmark = on_gpus()


@pytest.mark.parametrize("name", [*PACKED, *PADDED])
def test_texts_are_as_the_model_has_them(name):
    # The scores of T5 are not scaled: weights at random make of rounding more than the proof allows by default.
    encoder = text_encoder(name, text_model(name).cuda(), backend="cuda", verify=vg.options.Verify(tolerance=1e-4))
    check_texts(encoder, 1e-4)
    assert (encoder.why_padded is None) == (name in PACKED)


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_no_graph_can_run_are_refused(name):
    with pytest.raises(vg.errors.SpecError):
        vg.recipes.packed_text(text_model(name).cuda())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3", "t5", "mpnet"])
def test_half_precision_is_about_as_exact_as_the_model(name, dtype):
    exact, model = text_model(name).cuda(), text_model(name, dtype).cuda()
    encoder = text_encoder(name, model, backend="cuda", verify=0)
    outs = []
    for seed, lengths in enumerate(LENGTHS):
        call = texts(model, lengths, seed)
        real = call["attention_mask"].bool()
        with torch.no_grad():
            outs.append([run(**call).last_hidden_state[real] for run in (encoder, model, exact)])
    check_half_precision(*map(torch.cat, zip(*outs, strict=True)), dtype)
    assert not encoder.stats.eager


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3", "bart"])
def test_compiled_graphs_are_as_the_model(name):
    encoder = text_encoder(name, text_model(name).cuda(), backend="cuda", capture=vg.options.Capture(compile=True))
    check_texts(encoder, 1e-3)


def test_bart_is_graphed_in_bfloat16_alone():
    model = text_model("bart", torch.bfloat16).cuda()
    call = texts(model, [9, 30, 4])
    encoder = text_encoder("bart", model, backend="cuda", verify=0)
    with torch.no_grad():
        out, expected = encoder(**call), model(**call)
    assert error_of(out, expected, call["attention_mask"]) < 0.05
    assert not encoder.stats.eager
    with pytest.raises(vg.errors.SpecError, match=r"torch.isfinite\(hidden_states\)"):
        text_encoder("bart", text_model("bart", torch.float16).cuda(), backend="cuda")


def test_a_mask_on_the_gpu_costs_one_copy_to_the_host_and_one_on_the_cpu_none():
    encoder = text_encoder("bert", text_model("bert").cuda(), backend="cuda").capture()
    call = texts(encoder.module, [9, 30, 4])
    encoder(**call)  # the first call of a graph is compared with the model
    for mask, copies in ((call["attention_mask"], 1), (call["attention_mask"].cpu(), 0)):
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            encoder(call["input_ids"], attention_mask=mask)
            torch.cuda.synchronize()
        assert sum(event.count for event in profiled.key_averages() if "Memcpy DtoH" in event.key) == copies


def test_texts_padded_on_the_left_are_graphed():
    encoder = text_encoder("qwen3", text_model("qwen3").cuda(), backend="cuda")
    assert encoder.takes_left
    left = {name: tensor.flip(1) for name, tensor in texts(encoder.module, [9, 30, 4]).items()}
    real = left["attention_mask"].bool()
    with torch.no_grad():
        expected = encoder.module(**left).last_hidden_state[real]
    for _ in range(2):
        torch.testing.assert_close(encoder(**left).last_hidden_state[real], expected, rtol=1e-3, atol=1e-3)
    assert not encoder.stats.eager


def test_a_text_longer_than_the_table_of_positions_leaves_the_process_alive():
    encoder = text_encoder("bert", text_model("bert").cuda(), backend="cuda")
    with pytest.raises(vg.errors.LayoutError, match="expected texts of up to 64 tokens"):
        encoder(**texts(encoder.module, [3, 65]))
    encoder(**texts(encoder.module, [3, 64]))
    torch.cuda.synchronize()
