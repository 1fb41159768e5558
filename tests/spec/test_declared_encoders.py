"""Every encoder in the table of docs/declarations.md, declared as it says, held against the module itself."""

import pytest

from tests.support.declared import DECLARED
from tests.support.declared.case import check


@pytest.mark.parametrize("kind", DECLARED)
def test_what_the_page_says_can_be_declared_can_be(kind):
    check(DECLARED[kind]("cpu"), 1e-5)
