"""What an encoder does beside calls leaves a module alone: captures anew, checks, verifies, measures, diagnoses."""

import contextlib

import pytest

import varlen_graphs as vg
from tests.state.copies import Copy, call
from tests.support.encoders import rows_for
from tests.support.segments import relative

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

MODULES = [
    ("numbers_kept", "LongestOnlyKept"),
    ("numbers_kept", "LongestSoFar"),
    ("numbers_kept", "CountsCallsOnly"),
    ("tensors", "CountsInABufferOnly"),
    ("tensors", "MeanOfCallsBefore"),
    ("tensors", "BatchNormThatOnlyWatches"),
    ("tensors", "LastOutputKept"),
    ("tensors", "MemoryBankByANumber"),
    ("initialised", "KeepsTheFirstMean"),
    ("initialised", "BuildsALayer"),
    ("containers", "HistoryOfLengthsOnly"),
    ("containers", "TablesByLength"),
    ("containers", "PartsShareAList"),
    ("helpers", "KeepsADataclass"),
    ("helpers", "ListInAClosure"),
    ("helpers", "HookThatKeeps"),
    ("helpers", "PythonsOwnGenerator"),
]
each_module = pytest.mark.parametrize(("file", "name"), MODULES, ids=[name for _, name in MODULES])

OPERATIONS = {
    "check": lambda encoder, calls: encoder.check(),
    "report": lambda encoder, calls: encoder.report(),
    "capture": lambda encoder, calls: encoder.capture(),
    "verify": lambda encoder, calls: encoder.verify(calls),
    "poison": lambda encoder, calls: encoder.poison(),
    "release": lambda encoder, calls: encoder.release(),
    "release and capture": lambda encoder, calls: (encoder.release(), encoder.capture()),
    "another budget": lambda encoder, calls: encoder.add_budget(128),
    "costs": lambda encoder, calls: encoder.costs,
    "bytes": lambda encoder, calls: encoder.bytes,
    "state dict": lambda encoder, calls: encoder.state_dict(),
    "parts": lambda encoder, calls: [*encoder.named_modules(), *encoder.named_buffers()],
    "repr": lambda encoder, calls: repr(encoder),
}


@each_module
def test_what_an_encoder_does_beside_calls_leaves_a_module_alone(file, name):
    copy, plain = Copy(file, name), Copy(file, name)
    encoder, calls = copy.encoder(), [{"x": rows_for(n), "lengths": n} for n in ([150], [3, 4])]
    with contextlib.suppress(vg.errors.VarlenGraphsError):
        call(lambda x, n: encoder(x, lengths=n), 0, [5])
    if copy.differences(plain):  # it was not refused
        call(plain, 0, [5])
    assert not copy.differences(plain)
    for operation, operate in OPERATIONS.items():
        with contextlib.suppress(vg.errors.VarlenGraphsError):
            operate(encoder, calls)
        assert not copy.differences(plain), operation


@each_module
def test_a_diagnosis_is_a_plain_call_of_its_first_example(file, name):
    copy, plain = Copy(file, name), Copy(file, name)
    call(lambda x, n: vg.diagnose(copy.module, {"x": x}, {"x": rows_for([7])}), 0, [150])
    call(plain, 0, [150])
    assert not copy.differences(plain)


@each_module
def test_a_call_by_name_is_one_plain_call(file, name):
    """`eager` runs the module once, as calls do that have no graph."""
    copy, plain = Copy(file, name), Copy(file, name)
    encoder = copy.encoder()
    for number, lengths in enumerate(([5], [150], [5])):
        got = call(lambda x, n: encoder.eager(x, lengths=n), number, lengths)
        assert relative(got, call(plain, number, lengths)) < 1e-6
        assert not copy.differences(plain)


@each_module
def test_lazy_calls_are_plain_calls_and_captures_between_them_leave_a_module_alone(file, name):
    copy, plain = Copy(file, name), Copy(file, name)
    encoder = copy.encoder(capture=vg.options.Capture(lazy=True))
    for number, lengths in enumerate(([5], [150], [5])):
        got = call(lambda x, n: encoder(x, lengths=n), number, lengths)
        assert relative(got, call(plain, number, lengths)) < 1e-6
        assert not copy.differences(plain)
    with contextlib.suppress(vg.errors.VarlenGraphsError):
        encoder.capture_pending(None)
    assert not copy.differences(plain)
    for number, lengths in enumerate(([5], [150], [3, 4], [5])):
        try:
            got = call(lambda x, n: encoder(x, lengths=n), number, lengths)
        except vg.errors.VarlenGraphsError:
            return  # refused
        assert relative(got, call(plain, number, lengths)) < 1e-5


@pytest.mark.parametrize("backend", ["eager", "tape"])
@each_module
def test_calls_without_graphs_are_plain_calls(file, name, backend):
    """With the backend that captures nothing, and where the module is not to be replayed."""
    copy, plain = Copy(file, name), Copy(file, name)
    encoder = copy.encoder(backend=backend, eager_if=lambda module: "not now" if backend == "tape" else None)
    for number, lengths in enumerate(([5], [150], [3, 4], [5])):
        got = call(lambda x, n: encoder(x, lengths=n), number, lengths)
        assert relative(got, call(plain, number, lengths)) < 1e-6
        assert not copy.differences(plain)


@each_module
def test_comparisons_in_service_leave_what_calls_alone_leave(file, name):
    """Or what plain calls leave, if the module itself runs for them."""
    compared, alone, plain = Copy(file, name), Copy(file, name), Copy(file, name)
    encoders = [compared.encoder(verify=9), alone.encoder()]
    for number, lengths in enumerate(([5], [150], [3, 4], [5], [7])):
        expected = call(plain, number, lengths)
        for encoder in encoders:
            try:
                got = call(lambda x, n, encoder=encoder: encoder(x, lengths=n), number, lengths)
            except vg.errors.VarlenGraphsError:
                return  # refused
            assert relative(got, expected) < 1e-5
        assert not compared.differences(alone) or not compared.differences(plain)


@each_module
def test_new_weights_lead_to_captures_that_leave_a_module_alone(file, name):
    copy, plain = Copy(file, name), Copy(file, name)
    encoder = copy.encoder(capture=vg.options.Capture(on_change="recapture"))
    for number, lengths in enumerate(([5], [150], [5], [3, 4])):
        if number == 2:
            for one in (copy, plain):
                one.module.lin.weight.data = -one.module.lin.weight.data
        expected = call(plain, number, lengths)
        try:
            got = call(lambda x, n: encoder(x, lengths=n), number, lengths)
        except vg.errors.VarlenGraphsError:
            return  # refused
        assert relative(got, expected) < 1e-5


@each_module
def test_a_stage_is_a_plain_call(file, name):
    copy, plain = Copy(file, name), Copy(file, name)
    encoder = copy.encoder()

    def staged(rows, lengths):
        with encoder.stage(lengths) as stage:
            stage.rows.copy_(rows)
        return stage.output

    try:
        got = call(staged, 0, [5])
    except vg.errors.VarlenGraphsError:
        return  # refused
    assert relative(got, call(plain, 0, [5])) < 1e-5
    assert not copy.differences(plain)
