"""What holds for any encoder: a graph gives every item what it gets alone, eager and unpadded, whatever padding holds.

What a call gives again is bit for bit the same as long as the same budgets replay it. Once more graphs are captured, or
costs were measured, it may be split otherwise.
"""

import math

import torch

import varlen_graphs as vg
from tests.soak.cases import BATCHED
from tests.support.segments import relative
from tests.support.towers import equal_bits

TOLERANCE = {"cpu": 1e-4, "cuda": 2e-3}


def check_case(case, device="cpu"):
    """Run the calls of a case over NaN, and once more over what other calls left behind.

    Returns:
        What the encoder counted.

    Raises:
        AssertionError: An output is not that of its items alone, or depends on what memory held before.
    """
    encoder = case.encoder(device)
    first = []
    for call in case.calls:
        expected = unit_by_unit(case, encoder, call, device)
        if first:  # captured by now
            encoder.poison()
        costs, (got, budgets) = encoder.costs, replay_call(case, encoder, call, device)
        for name, tensor in expected.items():
            assert got[name].shape == tensor.shape, (call, name, got[name].shape, tensor.shape)
            error = relative(got[name], tensor)
            assert error < TOLERANCE[device], (call, name, error)
        first.append((costs, budgets, got))
    for call, (costs, budgets, before) in zip(reversed(case.calls), reversed(first), strict=True):
        again, budgets_again = replay_call(case, encoder, call, device)
        for name, tensor in before.items():
            if costs is encoder.costs and budgets == budgets_again:
                assert equal_bits(again[name], tensor), (call, name)
            else:
                assert relative(again[name], tensor) < TOLERANCE[device], (call, name)
    return encoder.stats


def check_exact_case(case, device="cpu"):
    """Make the calls of a case until their sizes have graphs of their own, which must give the bits of eager runs.

    Returns:
        What the encoder counted.

    Raises:
        AssertionError: A call gave something else.
    """
    encoder = case.encoder(device, vg.options.Capture(exact=2))
    for call in case.calls:
        for _ in range(4):
            run_call(case, encoder, call, device)
        encoder.capture_pending(None)
        encoder.poison()
        before = encoder.stats.exact.total()
        got = run_call(case, encoder, call, device)
        arguments, x = case.arguments(call, case.real_rows(call, device))
        expected = encoder.eager(x, **arguments)
        for name, tensor in expected.items():
            if encoder.stats.exact.total() > before:
                assert equal_bits(got[name], tensor), (call, name)
            assert relative(got[name], tensor) < TOLERANCE[device], (call, name)
    return encoder.stats


def check_wrong_case(case, device="cpu"):
    """Run the calls of a wrong case: each must be refused, or be what the module gives eager for all of its items.

    Random numbers and what memory held are no output to compare: such cases must never be replayed.

    Returns:
        What the encoder counted.

    Raises:
        AssertionError: A call gave something else without a word.
    """
    encoder = case.encoder(device)
    undefined = any(getattr(part, "name", None) in ("random", "unwritten") for part in case.parts)
    for call in (*case.calls, *case.calls):
        try:
            got = run_call(case, encoder, call, device)
        except vg.errors.VarlenGraphsError:
            continue
        assert not (undefined and encoder.stats.replays), call
        arguments, x = case.arguments(call, case.real_rows(call, device))
        for name, tensor in {} if undefined else encoder.eager(x, **arguments).items():
            error = relative(got[name], tensor)
            assert error < TOLERANCE[device] or not tensor.isfinite().all(), (call, name, error)
    return encoder.stats


def check_claim(claim, device="cpu"):
    """Run the calls of a claim: each must be refused, or be what the module itself gives.

    Errors of torch count as refusals: the forward cannot run with the buffers that it gets.

    Returns:
        What the encoder counted; `None` if it was refused.

    Raises:
        AssertionError: A call gave something else without a word.
    """
    case = claim.case
    try:
        encoder = claim.encoder(device)
    except vg.errors.VarlenGraphsError:
        return None
    for call in (*case.calls, *case.calls):
        try:
            got = run_call(case, encoder, call, device)
        except (vg.errors.VarlenGraphsError, IndexError, RuntimeError):
            continue
        arguments, x = case.arguments(call, case.real_rows(call, device))
        x = x.to(encoder.spec.row_input.dtype or x.dtype)  # as declared
        for one in encoder.spec.inputs:
            arguments[one.name] = arguments[one.name].to(one.dtype or arguments[one.name].dtype)
        for name, tensor in encoder.module(x, **arguments).items():
            assert got[name].shape == tensor.shape, (call, name, got[name].shape, tensor.shape)
            error = relative(got[name], tensor)
            assert error < TOLERANCE[device], (call, name, error)
    return encoder.stats


def replay_call(case, encoder, call, device):
    """The output of a call, and the budgets that replayed it."""
    before = encoder.stats.replays.copy()
    output = run_call(case, encoder, call, device)
    return output, encoder.stats.replays - before


def run_call(case, encoder, call, device):
    arguments, x = case.arguments(call, case.real_rows(call, device))
    if call.form == "stage":
        try:
            with encoder.stage(arguments.pop("layout"), **arguments) as stage:
                stage.rows.copy_(x)
            return stage.output
        except vg.errors.BudgetError:
            arguments, x = case.arguments(call, case.real_rows(call, device))
    output = encoder(x, **arguments)
    encoder.check()
    return output


def unit_by_unit(case, encoder, call, device):
    """The outputs of each item, or group, in a call of its own that runs without graphs."""
    rows = case.real_rows(call, device)
    outputs = []
    for unit in case.units(call):
        own, rows = rows.split([len_of(unit), len(rows) - len_of(unit)])
        arguments, x = case.arguments(unit, own)
        outputs.append(encoder.eager(x, **arguments))
    together = {}
    for name in case.outputs:
        tensors = [output[name] for output in outputs]
        if name == "rows" and case.layout in BATCHED:
            longest = max(tensor.shape[1] for tensor in tensors) + call.more
            together[name] = torch.cat(
                [torch.nn.functional.pad(tensor, (0, 0, 0, longest - tensor.shape[1])) for tensor in tensors]
            )
        else:
            together[name] = torch.cat(tensors, case.rows_dim if name == "rows" else 0)
    return together


def len_of(unit):
    return sum(map(math.prod, unit.items))
