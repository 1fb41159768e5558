"""The check of layouts that only the GPU has seen, compiled."""

from tests.support.gpu import on_gpus
from tests.support.item_checks import compare_kernel_and_reference

pytestmark = on_gpus()


def test_the_check_kernel_equals_the_reference():
    compare_kernel_and_reference("cuda")
