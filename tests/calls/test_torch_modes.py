"""`GraphedEncoder` under torch: modes and transforms of torch see each operation of an eager call, so calls under them run eager."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import varlen_graphs as vg
from tests.support.encoders import Attention, attention_encoder, attention_spec, rows_for
from tests.support.towers import pixels, qwen3_vl_tower

LENGTHS = [6, 4]


class Double(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.nn.functional.linear else out


class Listed(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations.append(func)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def module():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8).eval().requires_grad_(False)


@pytest.fixture
def encoder(module):
    return vg.GraphedEncoder(module, [64], vg.BufferSpec("input", vg.Lengths("lengths")), backend="tape")


def check_untouched(encoder, module, reason):
    """The next call is captured and replayed, and right."""
    rows = torch.randn(10, 8)
    torch.testing.assert_close(encoder(rows, lengths=LENGTHS), module(rows))
    assert encoder.stats.eager == {reason: 1}
    assert encoder.stats.replays.total() == 1


@pytest.mark.parametrize("captured", [False, True])
def test_a_function_mode_acts_and_is_not_captured(module, encoder, captured):
    rows = torch.randn(10, 8)
    if captured:
        encoder(rows, lengths=LENGTHS)
    with Double():
        assert torch.equal(encoder(rows, lengths=LENGTHS), module(rows))
    if not captured:
        check_untouched(encoder, module, "a function mode of torch")


def test_a_default_device_is_no_reason(module, encoder):
    with torch.device("cpu"):
        encoder(torch.randn(10, 8), lengths=LENGTHS)
    assert not encoder.stats.eager


def test_a_dispatch_mode_sees_what_the_module_computes(module, encoder):
    with Listed() as listed:
        encoder(torch.randn(10, 8), lengths=LENGTHS)
    assert torch.ops.aten.addmm.default in listed.operations
    check_untouched(encoder, module, "a dispatch mode of torch")


def test_fake_tensors_spoil_nothing(module, encoder):
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        rows = fake.from_tensor(torch.randn(10, 8))
        assert encoder(rows, lengths=LENGTHS).shape == (10, 8)
    check_untouched(encoder, module, "a dispatch mode of torch")


def test_tangents_are_kept(module, encoder):
    rows, tangent = torch.randn(2, 10, 8)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(rows, tangent)
        got, expected = (forward_ad.unpack_dual(out).tangent for out in (encoder(dual, lengths=LENGTHS), module(dual)))
        torch.testing.assert_close(got, expected)
    check_untouched(encoder, module, "forward-mode differentiation")


def test_transforms_run_the_module(module, encoder):
    rows = torch.randn(3, 10, 8)
    torch.testing.assert_close(torch.vmap(lambda x: encoder(x, lengths=LENGTHS))(rows), module(rows))
    check_untouched(encoder, module, "a transform of torch.func")
    _, tangents = torch.func.jvp(lambda x: encoder(x, lengths=LENGTHS), (rows[0],), (rows[1],))
    torch.testing.assert_close(tangents, rows[1] @ module.weight.T)


def test_calls_under_a_trace_are_no_constants_of_it():
    class Doubles(torch.nn.Module):
        def forward(self, x):
            return x * 2

    encoder = vg.GraphedEncoder(Doubles().eval(), [64], vg.BufferSpec("x", vg.Lengths("lengths")), backend="tape")
    rows, others = torch.randn(10, 8), torch.randn(10, 8)
    encoder(rows, lengths=LENGTHS)
    traced = torch.jit.trace(lambda x: encoder(x, lengths=LENGTHS), rows)
    assert torch.equal(traced(others), others * 2)
    assert encoder.stats.eager["torch.jit.trace"]


def test_nothing_is_captured_that_parametrize_has_cached(encoder, module):
    class Double(torch.nn.Module):
        def forward(self, weight):
            return weight * 2

    parametrize.register_parametrization(module, "weight", Double()).eval()
    rows = torch.randn(10, 8)
    with torch.no_grad(), parametrize.cached():
        encoder(rows, lengths=LENGTHS)
    with torch.no_grad():
        module.parametrizations.weight.original.mul_(3)
    check_untouched(encoder, module, "torch.nn.utils.parametrize.cached")


def test_another_default_dtype_than_that_of_the_capture_runs_eager():
    class Scales(torch.nn.Module):
        def forward(self, x):
            return x * torch.full((8,), 0.1, device=x.device)

    module, rows = Scales().eval(), torch.randn(10, 8)
    encoder = vg.GraphedEncoder(module, [64], vg.BufferSpec("x", vg.Lengths("lengths")), backend="tape")
    encoder(rows, lengths=LENGTHS)
    torch.set_default_dtype(torch.float64)
    try:
        assert encoder(rows, lengths=LENGTHS).dtype == module(rows).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert encoder.stats.eager == {"the default dtype differs from the capture": 1}


def test_tensors_of_a_subclass_act_as_they_do():
    class Shifted(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            out = super().__torch_function__(func, types, args, kwargs or {})
            return out + 1 if func is torch.Tensor.mul else out

    class Doubles(torch.nn.Module):
        def forward(self, x, scale):
            return x * scale

    spec = vg.BufferSpec("x", vg.Lengths("lengths"), inputs=[vg.inputs.PerCall("scale", shape=(8,))])
    encoder = vg.GraphedEncoder(Doubles().eval(), [64], spec, backend="tape")
    rows, scale = torch.randn(10, 8), torch.full((8,), 2.0)
    encoder(rows, lengths=LENGTHS, scale=scale)
    for own in ((rows.as_subclass(Shifted), scale), (rows, scale.as_subclass(Shifted))):
        out = encoder(own[0], lengths=LENGTHS, scale=own[1])
        assert torch.equal(out.as_subclass(torch.Tensor), rows * 2 + 1)
    with encoder.stage(LENGTHS, scale=scale.as_subclass(Shifted)) as stage:
        stage.rows.copy_(rows)
    assert torch.equal(stage.output.as_subclass(torch.Tensor), rows * 2 + 1)
    assert encoder.stats.eager == {"a tensor of a subclass of torch.Tensor": 3}


@pytest.mark.parametrize("outer", ["cpu", "cuda"])
def test_casts_that_a_forward_caches_are_not_kept_by_a_graph(outer):
    class Decorated(torch.nn.Linear):
        @torch.autocast("cpu", dtype=torch.bfloat16)
        def forward(self, input):
            return super().forward(input).float()

    module, rows = Decorated(8, 8).eval().requires_grad_(False), torch.randn(10, 8)
    encoder = vg.GraphedEncoder(module, [64], vg.BufferSpec("input", vg.Lengths("lengths")), backend="tape")
    with torch.autocast(outer, enabled=False):
        encoder(rows, lengths=LENGTHS)
    module.weight.mul_(3)
    torch.testing.assert_close(encoder(rows, lengths=LENGTHS), module(rows), atol=1e-2, rtol=1e-2)
    assert encoder.stats.replays.total() == 2


def recorded(encoder, rows, lengths):
    return torch.jit.trace(lambda x, own: encoder(x, lengths=own), (rows, lengths), check_trace=False)


def proxied(encoder, rows, lengths):
    return make_fx(lambda x, own: encoder(x, lengths=own))(rows, lengths)


def exported(encoder, rows, lengths):
    return torch.export.export(Called(encoder), (rows, lengths))


class Called(torch.nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, rows, lengths):
        return self.encoder(rows, lengths=lengths)


@pytest.mark.parametrize("record", [recorded, proxied, exported])
@pytest.mark.parametrize("captured", [False, True])
def test_no_tracer_keeps_the_items_of_its_example(record, captured):
    encoder, rows = attention_encoder(), rows_for(LENGTHS)
    if captured:
        encoder(rows, lengths=LENGTHS)
    with pytest.raises(
        vg.errors.InputError, match=r"vg.unwrap\(model\) first, or take the module itself \(encoder.module\)"
    ):
        record(encoder, rows, torch.tensor(LENGTHS))
    assert torch.equal(encoder(rows, lengths=LENGTHS), encoder(rows, lengths=torch.tensor(LENGTHS)))
    assert not encoder.stats.eager


def test_items_in_a_list_are_constants_of_a_trace():
    encoder = attention_encoder(module=Attention().requires_grad_(False))
    traced = torch.jit.trace(lambda x: encoder(x, lengths=LENGTHS), rows_for(LENGTHS), check_trace=False)
    other = rows_for(LENGTHS, seed=1)
    torch.testing.assert_close(traced(other), encoder(other, lengths=LENGTHS))


def test_symbolic_tracing_says_what_to_trace():
    with pytest.raises(
        vg.errors.InputError, match=r"called with a proxy of a tensor: expected tensors; call vg.unwrap"
    ):
        torch.fx.symbolic_trace(Called(attention_encoder()))


def test_a_stage_records_no_rows_that_come_later():
    encoder = attention_encoder(spec=attention_spec(rows=vg.inputs.Rows("x", shape=(8,))))

    def staged(rows):
        with encoder.stage(LENGTHS) as stage:
            stage.rows.copy_(rows)
        return stage.output

    with pytest.raises(vg.errors.InputError, match=r"stage was called under torch\.jit\.trace"):
        torch.jit.trace(staged, rows_for(LENGTHS))
    with Listed():
        assert torch.equal(staged(rows_for(LENGTHS)), encoder(rows_for(LENGTHS), lengths=LENGTHS))


def test_a_recipe_is_traced_as_its_tower():
    tower = qwen3_vl_tower(depth=2, deepstack_visual_indexes=[0]).requires_grad_(False)
    encoder = vg.recipes.qwen3_vl(tower, [vg.budgets.Budget(128, items=4)], backend="tape")
    one, other = [(1, 4, 6), (1, 4, 4)], [(1, 4, 4), (1, 4, 6)]
    encoder(pixels(one), grid_thw=one)
    calls = [(pixels(grid), torch.tensor(grid)) for grid in (one, other)]
    traced, expected = [
        torch.jit.trace(lambda x, grid, run=run: run(x, grid_thw=grid)[0], calls[0])(*calls[1])
        for run in (encoder, tower)
    ]
    assert torch.equal(traced, expected)  # which has constants of its own
