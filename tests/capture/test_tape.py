"""`TapeCapture`: it refuses and freezes what a CUDA graph refuses and freezes."""

import textwrap
import threading

import numpy
import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.forked_scripts import run_script
from varlen_graphs.capture.tape import TapeCapture


def tape(run):
    with torch.no_grad():
        return TapeCapture().capture(run, "the test")


def test_a_replay_computes_anew_from_the_same_memory():
    x, out = torch.tensor([1.0, 2.0]), torch.empty(2)
    recorded = tape(lambda: out.copy_((x * 2).relu() + x.sum()))
    x.copy_(torch.tensor([-1.0, 5.0]))
    recorded.replay()
    assert out.tolist() == [4.0, 14.0]


def test_no_python_of_the_module_runs_in_a_replay():
    calls, x, out = [], torch.ones(2), torch.empty(2)

    def run():
        calls.append(1)
        out.copy_(x + len(calls))

    recorded = tape(run)
    before = len(calls)
    out.zero_()
    recorded.replay()
    assert len(calls) == before
    assert out.tolist() == [1.0 + before] * 2  # the Python number is frozen


def test_changing_weights_in_place_is_followed_and_replacing_them_is_not():
    layer, x, out = nn.Linear(2, 2, bias=False), torch.ones(1, 2), torch.empty(1, 2)
    recorded = tape(lambda: out.copy_(layer(x)))
    with torch.no_grad():
        layer.weight.fill_(3.0)
    recorded.replay()
    assert out.tolist() == [[6.0, 6.0]]
    layer.weight.data = torch.zeros(2, 2)
    recorded.replay()
    assert out.tolist() == [[6.0, 6.0]]


def test_operations_in_place_and_through_views_are_replayed():
    x, out = torch.zeros(2, 3), torch.empty(6)

    def run():
        y = x.clone()
        y[0, 1:].add_(1)
        y.transpose(0, 1)[2].mul_(5)
        out.copy_(y.flatten())

    recorded = tape(run)
    x.copy_(torch.arange(6.0).reshape(2, 3))
    recorded.replay()
    assert out.tolist() == [0.0, 2.0, 15.0, 3.0, 4.0, 25.0]


def test_results_of_several_parts_are_replayed():
    x, out = torch.zeros(4), torch.empty(4)

    def run():
        values, order = x.sort()
        out.copy_(values * 10 + order)

    recorded = tape(run)
    x.copy_(torch.tensor([4.0, 1.0, 3.0, 2.0]))
    recorded.replay()
    assert out.tolist() == [11.0, 23.0, 32.0, 40.0]


def test_memory_that_nobody_writes_is_poisoned():
    x, out = torch.ones(3), torch.zeros(3)

    def run():
        unwritten = torch.empty(3, device=x.device)
        unwritten[:2] = x[:2]
        out.copy_(unwritten)

    recorded = tape(run)
    recorded.replay()
    assert out[:2].tolist() == [1.0, 1.0]
    assert out[2].isnan()


def test_a_cache_filled_in_the_run_does_not_outlive_it():
    """A cache first filled in a capture lies in the pool, where other graphs overwrite it: so it is poisoned here."""
    x, out, cache = torch.ones(3), torch.empty(3), []

    def run():
        if not cache:
            cache.append(x * 2)
        out.copy_(x * cache[0])

    recorded = tape(run)
    assert cache[0].tolist() == [2.0] * 3
    recorded.allocated[0].fill_(torch.nan)
    assert cache[0].isnan().all()
    recorded.replay()  # which computes it anew
    assert out.tolist() == [2.0] * 3


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("item", lambda x, n: x * n[0].item()),
        ("tolist", lambda x, n: x.split(n.tolist())),
        ("cpu", lambda x, n: x.cpu()),
        ("numpy", lambda x, n: torch.from_numpy(x.numpy())),
        ("__array__", lambda x, n: numpy.asarray(x)),
        ("__bool__", lambda x, n: x if n.sum() > 2 else -x),
        ("__int__", lambda x, n: x[: int(n[0])]),
        ("__float__", lambda x, n: x * float(n[0])),
        ("__index__", lambda x, n: list(range(n[0]))),
        ("reads a value on the host", lambda x, n: x[: n[0]]),
        ("reads a value on the host", lambda x, n: torch.arange(n[0], device=x.device)),
        ("shape of aten.nonzero", lambda x, n: x.nonzero()),
        ("shape of aten.index.Tensor", lambda x, n: x[x > 0]),
        ("shape of aten.index_put_", lambda x, n: x.clone().index_put_((x > 0,), x[:2])),
        ("shape of aten.masked_select", lambda x, n: x.masked_select(x > 0)),
        ("shape of aten._unique2", lambda x, n: x.unique()),
        ("shape of aten.unique_consecutive", lambda x, n: x.unique_consecutive()),
        ("shape of aten.repeat_interleave", lambda x, n: torch.repeat_interleave(n)),
        ("aten.equal.default compares", lambda x, n: torch.equal(x, x)),
        ("mixes device tensors with a host tensor [2]", lambda x, n: x + torch.tensor([1.0, 2.0])),
        ("mixes device tensors with a host tensor [2]", lambda x, n: x + torch.ones(2)),
        ("mixes device tensors with a host tensor [2]", lambda x, n: x[torch.tensor([0, 1])]),
        ("mixes device tensors with a host tensor [2]", lambda x, n: x + torch.from_numpy(numpy.ones(2)) * 2),
        ("copies a host tensor to the device", lambda x, n: x + torch.tensor([1.0, 2.0]).to(x.device)),
        ("copies a host tensor to the device", lambda x, n: x + torch.tensor([1.0, 2.0], device=x.device)),
        ("copies a host tensor to the device", lambda x, n: x.copy_(torch.tensor(2.0))),
        ("copies a device tensor to the host", lambda x, n: x.to("cpu")),
        ("copies a device tensor to the host", lambda x, n: x.to(device="cpu")),
        ("mixes device tensors with a host tensor [2]", lambda x, n: x + torch.arange(2, device="cpu")),
        ("writes a device tensor into a host tensor", lambda x, n: x * torch.zeros(()).add_(x.sum())),
        ("writes a device tensor into a host tensor", lambda x, n: torch.zeros(2).copy_(x)),
        ("shape of aten.index_put_", lambda x, n: x.clone().index_put_((x > 0,), x[0])),
        ("shape of aten._linalg_check_errors", lambda x, n: torch.linalg.inv(x[:1, None])),
        ("copies a host tensor to the device", lambda x, n: x * x.new_tensor([2.0])),
        (
            "draws from a generator of its own",
            lambda x, n: x + torch.rand(2, device=x.device, generator=torch.Generator()),
        ),
        ("__format__", lambda x, n: print(f"{x}")),
        ("__repr__", lambda x, n: repr(x)),
    ],
)
def test_what_a_capture_refuses_is_refused_by_name_and_line(name, run):
    x, n = torch.tensor([1.0, 2.0]), torch.tensor([1, 1])
    with pytest.raises(vg.errors.CaptureError) as error:
        tape(lambda: run(x, n))
    message = str(error.value)
    assert name in message
    assert "the test could not be captured" in message
    assert "test_tape.py" in message
    assert "lambda" in message  # the user's own line
    assert "vg.diagnose(module, call)" in message
    assert torch.ones(2).sum() == 2  # recording is over


def set_masked(x, mask, value):
    x[mask] = value
    return x


@pytest.mark.parametrize(
    "run",
    [
        lambda x, n: x * torch.tensor(2.0),
        lambda x, n: x + torch.tensor([1.0, 2.0]).sum().item(),
        lambda x, n: x * torch.ones(2).tolist()[0],
        lambda x, n: torch.where(x > 1, x, 0.0),
        lambda x, n: x.masked_fill(x > 1, 0.0),
        lambda x, n: x.clone().index_put_((x > 1,), torch.tensor(0.0)),
        lambda x, n: x[torch.zeros(2, dtype=torch.long, device=x.device)],
        lambda x, n: set_masked(x.clone(), x > 1, 0.0),
        lambda x, n: torch.repeat_interleave(x, n, output_size=2),
        lambda x, n: x + torch.zeros_like(x) + x.new_ones(2),
        lambda x, n: x.to(torch.float64).float().to(x.device),
    ],
)
def test_what_a_capture_allows_is_allowed(run):
    x, n, out = torch.tensor([1.0, 2.0]), torch.tensor([1, 1]), torch.empty(2)
    recorded = tape(lambda: out.copy_(run(x, n)))
    expected = run(x, n)
    out.fill_(torch.nan)
    recorded.replay()
    assert torch.equal(out, expected)


def test_a_host_scalar_is_frozen_as_on_a_gpu():
    x, out, numbers = torch.ones(2), torch.empty(2), [3.0]
    recorded = tape(lambda: out.copy_(x * torch.tensor(numbers[0])))
    numbers[0] = 7.0
    recorded.replay()
    assert out.tolist() == [3.0, 3.0]


def test_a_max_seqlen_read_on_the_host_is_refused_with_the_buffer_that_lifts_it():
    lengths = torch.tensor([3, 4])
    with pytest.raises(vg.errors.CaptureError, match="MaxSeqlen"):
        tape(lambda: lengths.max().item())


def test_other_threads_and_later_code_are_not_watched():
    x, read = torch.ones(2), []

    def run():
        thread = threading.Thread(target=lambda: read.append(x.tolist()))
        thread.start()
        thread.join()
        return x * 2

    tape(run)
    assert read == [[1.0, 1.0]]
    with pytest.raises(vg.errors.CaptureError):
        tape(lambda: x.tolist())
    assert x.tolist() == [1.0, 1.0]
    assert (x.sum() > 1).item()


TRITON = """
    import torch, triton, triton.language as tl
    from varlen_graphs.capture.tape import TapeCapture

    @triton.jit
    def double(x, out, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at) * 2)

    @torch.library.custom_op("test::double", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        double[(1,)](x, out, BLOCK=4)
        return out

    x, out = torch.arange(4.0), torch.empty(4)
    recorded = TapeCapture().capture(lambda: out.copy_(op(x)), "op")
    x.add_(1)
    recorded.replay()
    assert out.tolist() == [2.0, 4.0, 6.0, 8.0], out
"""


def test_triton_kernels_are_seen_as_custom_ops(tmp_path):
    script = tmp_path / "kernels.py"  # the interpreter reads a kernel's source, and its switch, when it is decorated
    script.write_text(textwrap.dedent(TRITON))
    run_script(f"import runpy\nos.environ['TRITON_INTERPRET'] = '1'\nrunpy.run_path({str(script)!r})")
