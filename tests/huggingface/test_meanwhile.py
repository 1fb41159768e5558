"""While an encoder is being made, a model is still wrapped for other threads; also what is left of one that was."""

import copy
import threading
import time
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import varlen_graphs as vg

DIM = 8


class Slow(nn.Module):
    """Waits in its runs, once it is told to, until it may go on."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM)])

    def forward(self, x, scale=1.0):
        if threading.current_thread() is MAKER:
            RUNS.set()
            GOES_ON.wait(10)
        return torch.tanh(self.layers[0](x)) * scale


MAKER: threading.Thread | None = None
RUNS, GOES_ON = threading.Event(), threading.Event()


@pytest.fixture(params=["the first form", "another form"])
def being_made(request):
    """A model that another thread makes an encoder of until the test ends, the rows of the call, and what it gives."""
    global MAKER
    torch.manual_seed(0)
    model, x = vg.wrap(Slow().eval(), backend="tape"), torch.randn(4, 6, DIM)
    scale, outputs = 1.0, []
    with torch.no_grad():
        if request.param == "another form":
            model(x)
            scale = 2.0
        expected = scale * torch.tanh(model.layers[0](x))

    def call():
        with torch.no_grad():
            outputs.append(model(x, scale=scale))

    RUNS.clear()
    GOES_ON.clear()
    MAKER = threading.Thread(target=call)
    MAKER.start()
    assert RUNS.wait(10)
    try:
        yield model, x
    finally:
        GOES_ON.set()
        MAKER.join()
        MAKER = None
    torch.testing.assert_close(outputs[0], expected)


def test_a_copy_has_weights_and_an_encoder_of_its_own(being_made):
    model, x = being_made
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.layers[0].weight.mul_(1.5)
        expected = torch.tanh(copied.layers[0](x))
        for _ in range(2):
            torch.testing.assert_close(copied(x), expected)
    assert vg.encoders(copied)[""].stats.replays.total() == 2
    assert "forward" not in vars(vg.unwrap(copied))


def test_other_threads_find_it_wrapped(being_made):
    model, _ = being_made
    assert "no tower is wrapped" not in vg.encoders(model).report()
    with pytest.raises(vg.errors.SpecError, match="is wrapped already"):
        vg.wrap(model)


def test_a_model_that_is_unwrapped_meanwhile_stays_so():
    torch.manual_seed(0)
    model, x = vg.wrap(Slow().eval(), backend="tape"), torch.randn(4, 6, DIM)
    with torch.no_grad():
        model(x)
        thread = threading.Thread(target=lambda: [model(x, scale=float(at)) for at in range(2, 6)])
        thread.start()
        time.sleep(0.05)
        vg.unwrap(model)
        thread.join()
        assert "forward" not in vars(model)
        torch.testing.assert_close(model(x), torch.tanh(model.layers[0](x)))
    assert not vg.encoders(model)


def test_a_forward_that_was_kept_runs_the_module_once_it_is_unwrapped():
    model, x = vg.wrap(Slow().eval(), backend="tape"), torch.randn(4, 6, DIM)
    kept = model.forward
    vg.unwrap(model)
    with torch.no_grad():
        assert torch.equal(kept(x), model(x))
        vg.wrap(model, backend="tape")
        torch.testing.assert_close(kept(x), model(x))


def test_the_first_call_may_be_checkpointed():
    model = vg.wrap(Slow().eval().requires_grad_(False), backend="tape")
    x = torch.ones(4, 6, DIM, requires_grad=True)
    with torch.enable_grad():
        for _ in range(2):
            checkpoint(model, x, use_reentrant=False).sum().backward()
    assert x.grad is not None


class NamesArguments(nn.Module):
    """Looks for the names of its arguments."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM)])

    def forward(self, x):
        return self.layers[0](x) * len(self.forward.__code__.co_varnames)


def test_a_forward_finds_its_code():
    model, x = NamesArguments().eval(), torch.randn(4, 6, DIM)
    expected = model(x)
    vg.wrap(model, backend="tape")
    torch.testing.assert_close(model(x), expected)
    assert vg.encoders(model)[""].stats.replays.total() == 1


class Turned(nn.Module):
    """Returns its features channels first, as a view."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM)])

    def forward(self, x):
        return self.layers[0](x).transpose(1, 2)


def test_outputs_have_the_memory_format_of_the_module():
    model = Turned().eval()
    x = torch.randn(70, 6, DIM)
    with torch.no_grad():
        expected = [model(x[:count]) for count in (4, 70)]
        vg.wrap(model, backend="tape")
        for own in expected:
            output = model(x[: len(own)])
            assert output.stride() == own.stride()
            torch.testing.assert_close(output.transpose(1, 2).view(-1), own.transpose(1, 2).view(-1))


class Sampler(nn.Module):
    """Adds noise to features."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM)])

    def forward(self, x):
        y = self.layers[0](x)
        return y + torch.randn_like(y)


def test_learning_draws_no_random_numbers_of_the_process():
    model, x = Sampler().eval(), torch.randn(4, 6, DIM)
    own = copy.deepcopy(model)
    vg.wrap(model, backend="tape")
    for _ in range(6):
        torch.manual_seed(0)
        expected, after = own(x), torch.rand(1)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(model(x), expected)
        assert torch.equal(torch.rand(1), after)


WRONG = {
    "a budget of nothing": ({"budgets": [0]}, vg.errors.BudgetError),
    "budgets that are none": ({"budgets": "a"}, vg.errors.BudgetError),
    "a ladder of rows": ({"budgets": vg.Ladder()}, vg.errors.BudgetError),
    "no amount of memory": ({"memory": "x"}, vg.errors.BudgetError),
    "no backend": ({"backend": "x"}, vg.errors.SpecError),
    "no option": ({"foo": 1}, TypeError),
}


@pytest.mark.parametrize(("options", "error"), WRONG.values(), ids=WRONG.keys())
def test_wrong_options_of_a_module_that_calls_tell_of_raise_at_once(options, error):
    model = Slow().eval()
    with pytest.raises(error):
        vg.wrap(model, **({"backend": "tape"} | options))
    assert "forward" not in vars(model)
