"""Copies of memory by address, compiled."""

from tests.support.gpu import on_gpus
from tests.support.transfers import check_kernel

pytestmark = on_gpus()


def test_the_kernel_copies_each_block_once():
    check_kernel("cuda")
