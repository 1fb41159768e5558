"""The doctor on a GPU: it finds what CUDA refuses, and nothing that CUDA takes."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.encoders import Of
from tests.support.gpu import on_gpus
from varlen_graphs.capture.cuda import CudaCapture

pytestmark = on_gpus()

PAGEABLE = torch.ones(4)


CASES = {
    "item": ("host sync", lambda m, x: x * x.sum().item()),
    "sliced": ("host sync", lambda m, x: x[: x.sum().long()]),
    "bool": ("branch", lambda m, x: x if x.sum() > 2 else -x),
    "equal": ("branch", lambda m, x: x if torch.equal(x, x + 1) else -x),
    "cpu": ("copy to host", lambda m, x: x.cpu()),
    "to a device": ("copy to host", lambda m, x: x.to(torch.device("cpu"))),
    "written": ("copy to host", lambda m, x: torch.zeros(4).copy_(x)),
    "pageable": ("copy to device", lambda m, x: x + PAGEABLE.to(x.device)),
    "pinned, blocking": ("copy to device", lambda m, x: x + m.pinned.to(x.device)),
    "made": ("copy to device", lambda m, x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)),
    "indexed by the host": ("host tensor", lambda m, x: x[torch.tensor([0, 1])]),
    "nonzero": ("data-dependent shape", lambda m, x: x.nonzero()),
    "masked": ("data-dependent shape", lambda m, x: x[x > 0]),
    "generator": ("own generator", lambda m, x: x + torch.rand(4, device=x.device, generator=GENERATOR)),
    "pinned, not blocking": (None, lambda m, x: x + m.pinned.to(x.device, non_blocking=True)),
    "host scalar": (None, lambda m, x: x * torch.tensor(2.0)),
    "host arithmetic": (None, lambda m, x: x * PAGEABLE.sum().item()),
    "random": ("random numbers", lambda m, x: x + torch.rand(4, device=x.device)),
}
GENERATOR = torch.Generator(device="cuda") if torch.cuda.is_available() else None


@pytest.mark.parametrize("name", CASES)
def test_the_doctor_and_cuda_agree(name):
    kind, function = CASES[name]
    module, x = Of(function).to("cuda"), torch.ones(4, device="cuda")
    module.pinned = torch.ones(4).pin_memory()
    diagnosis = vg.diagnose(module, x)
    assert [finding.kind for finding in diagnosis] == [kind] * (kind is not None)
    pool = vg.options.Pool()
    pool.bind(x.device)

    def run():
        out = module(x)
        return [out if isinstance(out, torch.Tensor) else x]

    try:
        with torch.no_grad():
            CudaCapture(pool).capture(run, name)
        captured = True
    except vg.errors.CaptureError:
        captured = False
    assert diagnosis.ok == captured
    assert torch.ones(4, device="cuda").sum() == 4  # the device is as it was


def test_a_tower_on_the_gpu_is_told_as_on_the_cpu():
    from benchmarks.doctor import TOWERS

    found = []
    for device in ("cpu", "cuda"):
        module, calls = TOWERS["Qwen3-VL"]()
        moved = [{name: tensor.to(device) for name, tensor in call.items()} for call in calls]
        found.append([(f.kind, f.line, f.modules) for f in vg.diagnose(module.to(device), *moved)])
    assert found[0] == found[1]
