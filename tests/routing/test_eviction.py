"""Eviction policies: one of your own, registered by name, keeps the limit of `memory=`."""

import math

import pytest

import varlen_graphs as vg
from tests.support.encoders import attention_encoder, attention_spec, captured, check
from varlen_graphs.routing.eviction import POLICIES

BUDGETS = tuple(vg.Budget(rows, items=8) for rows in (1024, 2048, 4096))
SMALL, MIDDLE, LARGE = BUDGETS
SHAPED = attention_spec(rows=vg.PackedRows("x", shape=(8,)))


class SmallestFirst:
    """Evicts the smallest budgets, and notes what it is told."""

    def __init__(self):
        self.records = []
        made.append(self)

    def record(self, replays, calls, requested=None):
        self.records.append((dict(replays), calls, dict(requested or {})))

    def evict(self, own, per_row, limit, costs):
        left, evicted = dict(own), []
        while left and (not evicted or per_row * max(left).rows + math.fsum(left.values()) > limit):
            evicted.append(min(left))
            del left[evicted[-1]]
        return evicted

    def worth(self, budget, own, costs, requested=0.0):
        return float(budget.rows)


made = []
"""The policies that encoders made for themselves."""


@pytest.fixture
def smallest_first(monkeypatch):
    """Register the policy; gives its memory limit."""
    monkeypatch.setitem(POLICIES, "smallest_first", SmallestFirst)
    made.clear()
    return vg.routing.Memory("1MiB", policy="smallest_first")


def encoder_with(memory, **options):
    return attention_encoder(BUDGETS, spec=SHAPED, memory=memory, **options)


def test_a_registered_policy_chooses_what_is_evicted(smallest_first):
    default = encoder_with(vg.routing.Memory("1MiB")).capture()
    assert default.stats.evicted == {LARGE: 1}
    encoder = encoder_with(smallest_first).capture()
    assert encoder.stats.evicted == {SMALL: 1, MIDDLE: 1}
    assert captured(encoder) == {LARGE}
    assert {*encoder.disabled} == {SMALL, MIDDLE}
    assert encoder.bytes() <= 1 << 20
    check(encoder, [20])
    assert encoder.stats.replays == {LARGE: 1}
    assert not encoder.stats.eager


def test_each_encoder_has_a_policy_of_its_own(smallest_first):
    for _ in range(2):
        encoder_with(smallest_first).capture()
    first, second = made
    assert first.records
    assert first.records == second.records


def test_a_policy_hears_of_replays_and_of_requests(smallest_first):
    encoder = encoder_with(smallest_first, capture=vg.Capture(lazy=True))
    check(encoder, [4000])
    assert encoder.capture_wanted() == [LARGE]
    for rows in (4000, 900):
        check(encoder, [rows])
    assert encoder.capture_wanted() == []  # no other budget fits beside the largest one
    (policy,) = made
    assert policy.records[0] == ({}, 1, {LARGE: 1})
    assert policy.records[-1] == ({LARGE: 1}, 3, {})


def test_a_policy_that_there_is_not_is_refused_by_name(smallest_first):
    with pytest.raises(vg.SpecError, match="policy='largest': expected one of 'least_useful', 'smallest_first'"):
        vg.routing.Memory("1MiB", policy="largest")


def test_a_limit_of_a_policy_is_an_amount_of_memory(smallest_first):
    with pytest.raises(vg.BudgetError, match="'2 apples'"):
        vg.routing.Memory("2 apples", policy="smallest_first")
