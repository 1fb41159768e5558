"""The copy of rows from an address, compiled."""

from tests.support.gpu import on_gpus
from tests.support.row_copies import check_kernel

pytestmark = on_gpus()


def test_the_kernel_copies_the_rows_and_clears_padding():
    check_kernel("cuda")
