"""Rows that graphs copy out of the caller's memory, on a GPU."""

import threading

import pytest
import torch

import varlen_graphs as vg
from tests.support.encoders import attention_encoder, rows_for
from tests.support.gpu import TWO_GPUS, on_gpus
from tests.support.row_copies import forms_of

pytestmark = on_gpus()

LENGTHS = [5, 9, 7]


def encoder_on(device="cuda"):
    return attention_encoder(module=attention_encoder().module.to(device), backend="cuda")


@pytest.mark.parametrize("form", forms_of(torch.ones(2, 8)))
def test_rows_in_memory_of_any_kind_are_taken(form):
    encoder, plain = encoder_on(), rows_for(LENGTHS, device="cuda")
    rows = forms_of(plain)[form]
    expected = encoder.eager(rows.to(torch.float32), lengths=LENGTHS)
    for _ in range(2):
        torch.testing.assert_close(encoder(rows, lengths=LENGTHS), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        encoder(rows, lengths=torch.tensor(LENGTHS, device="cuda")), expected, atol=1e-4, rtol=1e-4
    )
    assert not encoder.stats.eager


def test_rows_may_be_dropped_at_once_on_any_stream():
    encoder, stream = encoder_on(), torch.cuda.Stream()
    expected = encoder(rows_for(LENGTHS, 1, device="cuda"), lengths=LENGTHS)
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        for _ in range(50):
            torch.cuda._sleep(200_000)
            got = encoder(rows_for(LENGTHS, 1, device="cuda"), lengths=LENGTHS)
            junk = [torch.full((21, 8), torch.nan, device="cuda") for _ in range(4)]
            del junk
            assert torch.equal(got, expected)


def test_a_thread_that_has_not_used_the_gpu_may_call():
    encoder, rows = encoder_on(), rows_for(LENGTHS, device="cuda")
    expected, found = encoder(rows, lengths=LENGTHS), []
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: found.append(encoder(rows, lengths=LENGTHS)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(found[0], expected)


def test_a_large_call_is_copied_as_a_whole():
    class Sums(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones((), device="cuda"))
            self.eval()

        def forward(self, x):
            return x.double().sum(1) * self.scale

    spec = vg.BufferSpec(vg.inputs.Rows("x", (4096,), torch.float32), vg.Lengths())
    encoder = vg.GraphedEncoder(Sums(), [vg.budgets.Budget(140_000)], spec, backend="cuda")
    for rows in (139_999, 140_000):  # over 2 GiB
        x = torch.rand(rows, 4096, device="cuda")
        torch.testing.assert_close(encoder(x, lengths=[rows]), x.double().sum(1))
        del x
    assert not encoder.stats.eager


@TWO_GPUS
def test_an_encoder_on_another_device_than_the_current_one():
    encoder = encoder_on("cuda:1")
    rows = rows_for(LENGTHS, device="cuda:1")
    expected = encoder.eager(rows, lengths=LENGTHS)
    for turn in range(20):
        torch.cuda._sleep(2_000_000)  # on device 0, whose stream is no part of this
        other = rows_for(LENGTHS, turn, device="cuda:1")
        encoder(other, lengths=LENGTHS)
        torch.testing.assert_close(encoder(rows, lengths=LENGTHS), expected, atol=1e-4, rtol=1e-4)
    encoder.verify([{"x": rows, "lengths": LENGTHS}, {"x": rows_for([40], device="cuda:1"), "lengths": [40]}])
