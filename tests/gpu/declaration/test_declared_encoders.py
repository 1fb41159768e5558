"""Every encoder in the table of docs/declarations.md on real CUDA graphs."""

import pytest

from tests.support.declared import DECLARED
from tests.support.declared.case import check
from tests.support.gpu import on_gpus

pytestmark = on_gpus()


@pytest.mark.parametrize("kind", DECLARED)
def test_what_the_page_says_can_be_declared_can_be(kind):
    check(DECLARED[kind]("cuda"), 2e-3)
