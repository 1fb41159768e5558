"""Declared values of padding that a module does not take as indices: found before a kernel would read them."""

import pytest
import torch

from tests.support.gpu import on_gpus
from tests.support.pads import KINDS, check_pads

pytestmark = on_gpus()


@pytest.mark.parametrize("name", KINDS)
def test_a_declared_value_that_a_table_does_not_have_is_named(name):
    check_pads(name, backend="cuda")
    torch.cuda.synchronize()  # the device is of use afterwards
