"""`vg.wrap` on modules that are no models of transformers: understood by their first call."""

import copy
import gc
import threading
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.support.called_modules import DIM, Classifier, Model, Placed, Sequences, about, made, placed
from varlen_graphs.recipes import by_call

LADDER = vg.budgets.PaddedLadder(batch=4, length=48, step=2.0)


def wrapped(module, budgets=None):
    """Wrap a module, for padded batches if there are budgets of these."""
    own = copy.deepcopy(module)
    more = {} if budgets is None else {"padded": True}
    return vg.wrap(module, budgets, backend="tape", **more), own


def images(count, side=12):
    return torch.randn(count, 3, side, side)


def replays(model):
    return sum(
        one.stats.replays.total() for encoder in vg.encoders(model).values() for one in (encoder, *encoder.others)
    )


def eager(model):
    return {path: dict(stats.eager) for path, stats in vg.encoders(model).stats.items() if stats.eager}


def test_batches_of_any_size_and_shape_replay():
    model, own = wrapped(made(Classifier))
    for count, side in ((2, 12), (1, 12), (5, 12), (3, 20), (40, 12)):
        call = images(count, side)
        torch.testing.assert_close(model(call), own(call))
    assert replays(model) == 6  # the last in two
    assert not eager(model)


@pytest.mark.parametrize(
    ("real", "dtype", "output"),
    [(real, dtype, "rows") for real in (True, False) for dtype in (torch.bool, torch.int64)]
    + [(None, torch.int64, "rows"), (True, torch.bool, "both"), (False, torch.int64, "dataclass"), (None, torch.int64, "both")],
    ids=str,
)  # fmt: skip
def test_padded_batches_of_any_length_replay(real, dtype, output):
    model, own = wrapped(made(Sequences, real, output), LADDER)
    for lengths in ([20, 7, 13], [33], [5, 5], [40, 1]):
        call = torch.randn(len(lengths), max(lengths), DIM), about(lengths, real, dtype)
        ours, expected = model(*call), own(*call)
        assert type(ours) is type(expected)
        ours, expected = (
            {"rows": (one,), "both": one, "dataclass": tuple(vars(one).values()) if output == "dataclass" else ()}[
                output
            ]
            for one in (ours, expected)
        )
        for got, right in zip(ours, expected, strict=True):
            if isinstance(right, str) or right.dim() == 2:
                assert got == right if isinstance(right, str) else torch.allclose(got, right, atol=1e-5)
                continue
            for item, length in enumerate(lengths):
                torch.testing.assert_close(got[item, :length], right[item, :length])
    assert replays(model) == 4
    assert not eager(model)


@given(
    lengths=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=1, max_size=4),
    real=st.sampled_from([True, False, None]),
    scaled=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_outputs_are_those_of_the_module_whatever_the_calls(lengths, real, scaled):
    model, own = wrapped(made(Sequences, real), LADDER)
    for each in lengths:
        call = {"x": torch.randn(len(each), max(each), DIM), "about": about(each, real)}
        call |= {"scale": torch.rand(len(each))} if scaled else {}
        ours, expected = model(**call), own(**call)
        for item, length in enumerate(each):
            torch.testing.assert_close(ours[item, :length], expected[item, :length])


def test_each_form_of_calls_is_learned():
    model, own = wrapped(made(Classifier))
    options = {"factor": 2.0}
    for count, arguments in ((2, {}), (3, {"scale": 0.5}), (1, {"options": options}), (4, {"scale": 0.5})):
        call = images(count)
        torch.testing.assert_close(model(call, **arguments), own(call, **arguments))
    options["factor"] = 3.0  # the caller's own, which no graph holds
    call = images(2)
    torch.testing.assert_close(model(call, options=options), own(call, options=options))
    assert replays(model) == 5
    assert not eager(model)
    assert vg.encoders(model).report().count("some calls are answered by") == 3


def test_calls_of_more_forms_run_eager():
    model, own = wrapped(made(Classifier))
    call = images(2)
    with pytest.warns(UserWarning, match="was called in 16 forms before, with other arguments"):
        outputs = [model(call, scale=float(number + 2)) for number in range(18)]
    for number, output in enumerate(outputs):
        torch.testing.assert_close(output, own(call, scale=float(number + 2)))
    assert replays(model) == 16
    assert list(eager(model)[""].values()) == [2]


def test_the_parts_that_are_called_get_encoders():
    model, own = wrapped(made(Model))
    call, x = images(2), torch.randn(2, 9, DIM)
    assert not vg.encoders(model)
    assert vg.encoders(model).eager[""] == "Model is understood by its first call"
    torch.testing.assert_close(model.encode_images(call), own.encode_images(call))
    torch.testing.assert_close(model.encode_texts(x), own.encode_texts(x))
    assert [*vg.encoders(model)] == ["images", "texts"]
    with pytest.warns(UserWarning, match="Model runs as it is, because Classifier in it has graphs"):
        torch.testing.assert_close(model(call, x), own(call, x))
    assert replays(model) == 4


def test_a_module_that_is_called_itself_has_one_encoder():
    model, own = wrapped(made(Model))
    call, x = images(3), torch.randn(3, 9, DIM)
    torch.testing.assert_close(model(call, x), own(call, x))
    torch.testing.assert_close(model.encode_texts(x), own.encode_texts(x))
    assert [*vg.encoders(model)] == [""]
    assert replays(model) == 1
    vg.unwrap(model)
    assert "forward" not in vars(model) | vars(model.images) | vars(model.texts)
    torch.testing.assert_close(model(call, x), own(call, x))


class Odd(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.linear, self.run = nn.Linear(DIM, DIM), run

    def forward(self, x, others=None):
        return self.run(self.linear(x), others)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            lambda x, others: x * float(x.sum() > 0),
            r"Tensor\.__(bool|float)__ reads a tensor on the host.*test_by_call",
        ),
        (lambda x, others: x - x.mean(0), "depends on the other inputs of the batch"),
        (lambda x, others: x.sum(), "none of its outputs has an entry"),
        (lambda x, others: (x, x.sum()), r"its outputs \[1\] have no entry"),
        (lambda x, others: x + torch.rand_like(x), "or on chance"),
    ],
    ids=["host", "items", "sum", "scalar", "chance"],
)
def test_what_no_graph_may_answer_runs_eager_with_the_reason(run, message):
    model = vg.wrap(made(Odd, run), backend="tape")
    with pytest.warns(UserWarning, match=f"(?s)a call of Odd.*runs eager:.*{message}"):
        model(torch.randn(3, DIM))
    assert replays(model) == 0
    assert sum(eager(model)[""].values()) == 1


def test_tensors_inside_of_arguments_are_named():
    model = vg.wrap(made(Odd, lambda x, others: x + others[0]), backend="tape")
    with pytest.warns(UserWarning, match=r"Odd takes \['others'\], which hold tensors"):
        model(torch.randn(3, DIM), [torch.ones(3, DIM)])


def test_the_report_says_why_the_last_call_was_refused():
    model = vg.wrap(made(Odd, lambda x, others: x.sum()), backend="tape")
    with pytest.warns(UserWarning, match="runs eager"):
        model(torch.randn(3, DIM))
    assert "the last one was refused: Odd cannot be graphed" in vg.encoders(model).report()
    for _ in range(5):
        model(torch.randn(3, DIM))
    assert eager(model) == {"": {"arguments that vg.wrap did not understand": 6}}


class Streams(nn.Module):
    """Keeps the rows of earlier calls, if asked to."""

    def __init__(self):
        super().__init__()
        self.linear, self.kept = nn.Linear(DIM, DIM), None
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x, keeps=False, averages=False):
        y = self.linear(x)
        if averages:
            self.mean = torch.lerp(self.mean, y.mean((0, 1)), 0.1)
        if keeps:
            self.kept = y if self.kept is None else torch.cat([self.kept, y], 1)
            y = y + self.kept.mean(1, keepdim=True)
        return y


@pytest.mark.parametrize("how", ["keeps", "averages"])
def test_what_a_module_keeps_in_calls_with_other_arguments_is_of_these_calls_alone(how):
    model, own = wrapped(made(Streams))
    for rows in (4, 1, 1):
        call = torch.randn(2, rows, DIM)
        torch.testing.assert_close(model(call, **{how: True}), own(call, **{how: True}))
    assert torch.equal(model.mean, own.mean)
    assert (model.kept is None) == (own.kept is None)
    assert own.kept is None or torch.equal(model.kept, own.kept)


def test_hooks_see_the_calls_alone_that_bring_other_arguments():
    model, seen = wrapped(made(Streams))[0], []
    model.linear.register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    for count in (2, 3):
        model(torch.randn(count, 4, DIM), averages=True)
    assert seen == [2, 3]


@pytest.mark.parametrize(
    ("run", "call"),
    [
        (lambda x: x.dequantize() * 2, lambda: torch.quantize_per_tensor(torch.randn(2, DIM), 0.1, 0, torch.qint8)),
        (lambda x: x.real + x.imag, lambda: torch.randn(2, DIM, dtype=torch.complex64).conj()),
        (lambda x: x * 2, lambda: torch.randn(2, 0, DIM)),
    ],
    ids=["quantized", "conjugated", "empty"],
)
def test_calls_of_unusual_tensors_are_answered(run, call):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return run(x) * self.scale

    model, own = wrapped(Plain().eval())
    for _ in range(2):
        x = call()
        torch.testing.assert_close(model(x), own(x))
    if not x.is_quantized:
        model(torch.randn(2, 4, DIM, dtype=x.dtype))
        torch.testing.assert_close(model(x), own(x))


def test_an_empty_tensor_beside_the_batch_runs_eager():
    class Prompted(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x, prompt):
            return torch.cat([prompt, x], 1) * self.scale

    model, own = wrapped(Prompted().eval())
    for length in (3, 0):
        call = torch.randn(2, 4, DIM), torch.randn(2, length, DIM)
        torch.testing.assert_close(model(*call), own(*call))
    assert replays(model) == 1
    assert sum(eager(model)[""].values()) == 1


def test_layers_of_an_rnn_are_understood():
    model, own = wrapped(nn.GRU(DIM, DIM, batch_first=True).eval())
    for count in (2, 5):
        call = torch.randn(count, 3, DIM)
        for ours, expected in zip(model(call), own(call), strict=True):
            torch.testing.assert_close(ours, expected)
    assert replays(model) == 2


class ManyAtOnce(nn.Module):
    """Does something else in batches of this many and more."""

    def __init__(self, run, least=20):
        super().__init__()
        self.linear, self.run, self.least = nn.Linear(DIM, DIM), run, least
        self.scale = nn.Parameter(torch.ones(DIM), requires_grad=False)

    def forward(self, x):
        y = self.linear(x) * self.scale
        return self.run(self, y) if len(x) >= self.least else y


def group_means(module, y):
    return torch.cat([group - group.mean(0, keepdim=True) for group in y.split(24)])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "run",
    [
        lambda module, y: y - y.mean(0, keepdim=True),
        lambda module, y: y * 2,
        group_means,
        lambda module, y: y * float(y.abs().max()),
    ],
    ids=["mean", "twice", "groups", "host"],
)
def test_larger_calls_are_not_split_where_their_own_graph_is_wrong(run):
    model, own = wrapped(ManyAtOnce(run).eval())
    for count in (1, 2, 3, 5, 9, 17, 24, 28, 32, 40):
        call = torch.randn(count, 6, DIM)
        torch.testing.assert_close(model(call), own(call))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("least", [9, 10, 20])
def test_no_trial_writes_to_weights_whichever_graphs_there_are(least):
    def writes(module, y):
        module.scale.data.mul_(2.0)
        return y

    model, own = wrapped(ManyAtOnce(writes, least).eval())
    for count in (1, 3, 8, 9, 9, 33, 20):
        call = torch.randn(count, 6, DIM)
        ours = model(call)
        torch.testing.assert_close(ours, own(call))
        assert torch.equal(model.scale, own.scale)


def test_outputs_of_quantized_tensors_run_eager():
    class Quantizes(nn.Linear):
        def forward(self, x):
            return torch.quantize_per_tensor(super().forward(x), 0.1, 0, torch.qint8)

    model, own = wrapped(Quantizes(DIM, DIM).eval())
    call = torch.randn(3, 6, DIM)
    for _ in range(2):
        assert torch.equal(model(call).dequantize(), own(call).dequantize())


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_weights_that_hooks_of_torch_compute_are_followed(norm):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(norm(nn.Linear(DIM, DIM)), nn.ReLU()).eval()

    model, own = vg.wrap(make(), backend="tape"), make()  # such modules cannot be copied
    for _ in range(2):
        for count in (2, 5):
            call = torch.randn(count, DIM)
            torch.testing.assert_close(model(call), own(call))
        for one in (model, own):
            next(one[0].parameters()).mul_(2.0)
    assert replays(model) == 4


SEEN = []
"""What a hook has seen: shadows share it, because nothing holds it."""


def test_hooks_see_no_trial_runs():
    model = wrapped(made(Streams))[0]
    hook = model.linear.register_forward_hook(lambda module, args, output: SEEN.append(len(args[0])))
    for count in (3, 2):
        model(torch.randn(count, 4, DIM))
    assert SEEN == [3, 2]
    assert eager(model) == {"": {"forward hooks": 2}}
    hook.remove()
    model(torch.randn(3, 4, DIM))
    assert replays(model) == 1
    model.linear.register_forward_hook(lambda module, args, output: SEEN.append(len(args[0])))
    with pytest.warns(UserWarning, match="new form, and has forward hooks"):
        model(torch.randn(5, 4, DIM), averages=True)
    assert SEEN == [3, 2, 5]


def test_a_call_that_fails_in_the_library_is_answered_by_the_module(monkeypatch):
    model, own = wrapped(made(Classifier))
    monkeypatch.setattr("varlen_graphs.verify.synthetic_calls.prod", None)
    call = images(2)
    with pytest.warns(UserWarning, match=r"a call of Classifier.*runs eager: TypeError"):
        torch.testing.assert_close(model(call), own(call))
    assert eager(model)[""] == {"an error in varlen_graphs": 1}
    assert "is not callable" in vg.encoders(model).report()


def test_a_module_that_fails_runs_once():
    class Counts(nn.Linear):
        calls = 0

        def forward(self, x):
            if x.dtype == torch.float64:
                self.calls += 1  # of this one, and not of its shadows
                raise KeyError("of the module")
            return super().forward(x)

    model = vg.wrap(Counts(DIM, DIM).eval(), backend="tape")
    model(torch.randn(2, DIM))
    for count in (1, 2):
        warned = pytest.warns(UserWarning, match="runs eager") if count == 1 else nullcontext()
        with warned, pytest.raises(KeyError, match="of the module"):
            model(torch.randn(2, DIM, dtype=torch.float64))
        assert model.calls == count


def test_errors_of_the_module_are_its_own():
    model = vg.wrap(made(Classifier), backend="tape")
    with pytest.warns(UserWarning, match="runs eager"), pytest.raises(RuntimeError, match="channels"):
        model(torch.randn(2, 4, 12, 12))


def test_a_module_in_training_mode_waits():
    model = vg.wrap(made(Classifier).train(), backend="tape")
    with pytest.warns(UserWarning, match="is in training mode"):
        model(images(2))
    model.eval()
    model(images(2))
    assert replays(model) == 1


def test_calls_are_not_kept():
    model = vg.wrap(made(Classifier), backend="tape")
    call = images(2)
    reference = weakref.ref(call)
    model(call)
    del call
    gc.collect()
    assert reference() is None


def test_a_copy_learns_by_itself():
    model, own = wrapped(made(Classifier))
    call = images(2)
    model(call)
    other = copy.deepcopy(model)
    other.head.weight.data.add_(1.0)
    own.head.weight.data.add_(1.0)
    torch.testing.assert_close(other(call), own(call))
    assert replays(other) == 1


def test_a_copy_that_was_not_called_has_one_encoder_too():
    model, own = wrapped(made(Model))
    model = copy.deepcopy(model)
    call, x = images(3), torch.randn(3, 9, DIM)
    torch.testing.assert_close(model(call, x), own(call, x))
    assert [*vg.encoders(model)] == [""]
    assert replays(model) == 1


def test_threads_that_call_first_learn_once():
    model, own = wrapped(made(Classifier))
    calls = [images(count + 1) for count in range(4)]
    found = [None] * 4

    def run(at):
        with torch.no_grad():
            found[at] = model(calls[at])

    threads = [threading.Thread(target=run, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for call, got in zip(calls, found, strict=True):
        torch.testing.assert_close(got, own(call))
    assert not vg.encoders(model)[""].others


def test_an_encoder_by_a_call_of_its_own():
    module = made(Classifier)
    encoder = by_call(module, [1, 4], call={"images": images(2)}, backend="tape")
    call = images(3)
    torch.testing.assert_close(encoder(call), module(call))
    torch.testing.assert_close(encoder(call, 2.0), module(call, 2.0))
    assert [budget.items for budget in encoder.budgets] == [1, 4]
    assert encoder.stats.replays.total() == encoder.others[0].stats.replays.total() == 1
    with pytest.raises(vg.errors.SpecError, match=r"call model\.eval"):
        by_call(module.train(), call={"images": call})


# What a call may be mistaken for


class Leaks(nn.Module):
    """Takes a mask, and lets padding through in some way all the same, or is no mask's business."""

    def __init__(self, how):
        super().__init__()
        self.conv, self.linear = nn.Conv1d(DIM, DIM, 3, padding=1), nn.Linear(DIM, DIM)
        self.attention, self.types = nn.MultiheadAttention(DIM, 4, batch_first=True), nn.Embedding(64, DIM)
        self.gru, self.how = nn.GRU(DIM, DIM, batch_first=True), how

    def forward(self, x, about):
        if self.how == "convolution":
            x = self.conv(x.mT).mT
            return self.attention(x, x, x, key_padding_mask=~about.bool(), need_weights=False)[0]
        if self.how == "sum":
            return self.linear(x.sum(1))
        if self.how == "product":
            return self.linear(x) * about[..., None]
        types = self.types(about.long())
        return self.gru(x + (types if about.dim() > 1 else types[:, None]))[0]


@pytest.mark.parametrize("how", ["convolution", "sum", "product", "types"])
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_what_looks_like_a_mask_changes_no_real_row(how, left, padded):
    model, own = wrapped(made(Leaks, how), LADDER if padded else None)
    for lengths in ([12, 12], [5, 12], [12, 3], [1, 12]):
        mask = torch.arange(12) < torch.tensor(lengths)[:, None]
        call = torch.randn(2, 12, DIM), mask.flip(1) if left else mask
        torch.testing.assert_close(model(*call), own(*call))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_steps_that_look_like_lengths_stay_what_they_are(dtype, padded):
    model, own = wrapped(made(Leaks, "types"), LADDER if padded else None)
    for steps in ([6, 2], [5, 3], [6, 6]):
        call = torch.randn(2, 6, DIM), torch.tensor(steps, dtype=dtype)
        torch.testing.assert_close(model(*call), own(*call))


@pytest.mark.parametrize("real", [True, False, None], ids=["mask", "padding mask", "lengths"])
def test_by_default_padding_is_what_the_module_makes_of_it(real):
    model, own = wrapped(made(Sequences, real, "both"))
    for lengths in ([20, 7, 13], [33], [20, 20, 1]):
        call = torch.randn(len(lengths), max(lengths), DIM), about(lengths, real)
        torch.testing.assert_close(model(*call), own(*call))
    assert replays(model) == 3
    assert not eager(model)


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(DIM, DIM))

    def forward(self, x, collected=None):
        x = self.layers(x) if collected is None else self.layers(x * 1)
        if collected is not None:
            collected.append(x)
        return x


def test_what_is_written_to_arguments_is_written():
    model, own = wrapped(made(Writes))
    x, y, collected = torch.randn(3, DIM), torch.randn(3, DIM), []
    expected, copied = x.clone(), y.clone()
    with pytest.warns(UserWarning, match=r"writes to its arguments \['x'\]"):
        torch.testing.assert_close(model(x) + x, own(expected) + expected)
    model(y, collected)
    torch.testing.assert_close(collected, [own(copied, [])])
    assert replays(model) == 0


def test_what_may_be_written_to_arguments_is_found_where_it_changes_nothing():
    model, own = wrapped(made(Writes))
    for seed, first in enumerate((torch.rand(3, DIM), torch.randn(3, DIM))):  # no negative numbers at first
        x, expected = first.clone(), first.clone()
        with pytest.warns(UserWarning, match=r"writes to its arguments \['x'\]") if not seed else nullcontext():
            torch.testing.assert_close(model(x), own(expected))
        assert torch.equal(x, expected)
    assert replays(model) == 0


def test_a_call_that_the_module_refuses_is_forgotten():
    model, own = wrapped(made(Classifier))
    with pytest.warns(UserWarning, match="a call of Classifier"), pytest.raises(RuntimeError, match="channels"):
        model(torch.randn(2, 4, 12, 12))
    call = images(2)
    torch.testing.assert_close(model(call), own(call))
    assert replays(model) == 1


def test_arguments_that_cannot_be_copied_run_eager():
    model = vg.wrap(made(Odd, lambda x, others: x * 1), backend="tape")
    with pytest.warns(UserWarning, match=r"takes \['others'\], which cannot be copied"):
        model(torch.randn(3, DIM), threading.Lock())


def test_arguments_that_cannot_be_compared_run_eager():
    model = vg.wrap(made(Odd, lambda x, others: x * 1), backend="tape")
    with pytest.warns(UserWarning, match=r"takes \['others'\], which cannot be compared from call to call"):
        model(torch.randn(3, DIM), object())


def test_an_option_that_there_is_not_is_told_at_once():
    module = made(Classifier)
    with pytest.raises(TypeError, match="bakend"):
        vg.wrap(module, bakend="tape")
    assert "forward" not in vars(module)


def test_a_script_is_refused():
    with pytest.raises(vg.errors.SpecError, match=r"compiled by torch\.jit.*wrap the one that it was made of"):
        vg.wrap(torch.jit.script(nn.Sequential(nn.Linear(2, 2))))


def test_a_batch_in_several_replays_is_compared_once():
    model, own = wrapped(made(Odd, lambda x, others: x * (2 if len(x) > 32 else 1)))
    for count in (3, 8, 32, 40):
        call = torch.randn(count, DIM)
        torch.testing.assert_close(model(call), own(call))


class Pools(nn.Module):
    """A method that reads all rows of a part, those of padding too; and a part that returns its mask."""

    def __init__(self):
        super().__init__()
        self.layers = Sequences(real=False, output="both")

    def embed(self, x, padding):
        rows, first = self.layers(x, padding)
        return rows.mean(1) + first, padding


def test_rows_of_padding_that_others_read_are_those_of_the_module():
    model, own = wrapped(made(Pools))
    for lengths in ([6, 3], [6, 6], [2, 6]):
        call = torch.randn(2, 6, DIM), about(lengths, False)
        torch.testing.assert_close(model.embed(*call), own.embed(*call))
    assert replays(model) == 3


def test_places_among_floats_that_no_check_can_vary_run_eager():
    model, own = wrapped(made(Placed))
    calls = [placed(batch) for batch in (3, 2, 3)]
    with pytest.warns(UserWarning, match="index out of range"):
        first = model(calls[0])
    assert torch.equal(first, own(calls[0]))
    assert all(torch.equal(model(call), own(call)) for call in calls)
    assert replays(model) == 0


class NamedTower(Classifier):
    """Calls an argument as functions in place of a module call that."""

    def forward(self, x, tower=None):
        return super().forward(x)


@pytest.mark.parametrize("hook", [False, True])
def test_names_of_arguments_and_hooks_that_change_outputs_keep_no_module_from_graphs(hook):
    module = made(NamedTower)
    encoder_of = partial(vg.recipes.by_call, call={"x": images(2)}, backend="tape")
    handle = module.register_forward_hook(lambda module, args, out: 2 * out)
    encoder = encoder_of(module) if hook else None
    handle.remove()
    encoder, x = encoder or encoder_of(module), images(3)
    torch.testing.assert_close(encoder(x), module.forward(x))
    assert encoder.stats.replays.total() == 1


class Attends(nn.Module):
    """Attends to itself where it gets one tensor twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM)])

    def forward(self, query, key):
        return self.layers[0](query) * (2 if key is query else 1) + key


@pytest.mark.parametrize("itself", [True, False])
def test_one_tensor_as_two_arguments_is_the_modules_own_business(itself):
    model, own = wrapped(made(Attends))
    x, y = torch.randn(3, DIM), torch.randn(3, DIM)
    for key in (x, y, x, y) if itself else (y, x, y, x):
        torch.testing.assert_close(model(x, key), own(x, key))
    assert replays(model) == 2
    assert eager(model) == {"": {"arguments that vg.wrap did not understand": 2}}


def test_an_argument_that_is_returned_stays_what_it_is():
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(DIM, DIM)])

        def forward(self, x):
            return self.layers[0](x), x

    model, _ = wrapped(made(Returns))
    for _ in range(2):
        x = torch.randn(3, DIM)
        assert model(x)[1] is x
    assert replays(model) == 0


class FromLast(nn.Module):
    """Scales by the length of the call before."""

    def __init__(self):
        super().__init__()
        self.layers, self.last = nn.ModuleList([nn.Linear(DIM, DIM)]), 1

    def forward(self, x):
        """Project."""
        out, self.last = self.layers[0](x) * self.last, x.shape[1]
        return out


def test_a_call_whose_capture_fails_runs_the_module_once():
    model, own = wrapped(made(FromLast))
    for length in (5, 5, 5, 9, 9, 5, 5, 9, 9, 5, 9):
        x = torch.randn(2, length, DIM)
        torch.testing.assert_close(model(x), own(x))
        assert model.last == own.last
