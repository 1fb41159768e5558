"""Declared values of padding that a module does not take as indices: named before any graph is captured."""

import pytest

import varlen_graphs as vg
from tests.support.pads import KINDS, TOKENS, check_pads


@pytest.mark.parametrize("prove", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_a_declared_value_that_a_table_does_not_have_is_named(name, prove):
    check_pads(name, backend="tape", verify=vg.options.Verify(at_capture=prove))


def test_a_declared_value_that_the_tables_have_is_not():
    for module, spec, _, more in KINDS.values():
        if "default=7" not in str(spec(2)) and "pad=-1" not in str(spec(2)):
            encoder = vg.GraphedEncoder(module(), [64], spec(2), backend="tape")
            assert encoder(TOKENS, lengths=[6], **more).shape == (6, 4)
