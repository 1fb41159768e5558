"""The properties of test_untrusted.py, guided by coverage: `python -m tests.fuzz -max_total_time=300`, or more options
of libFuzzer. Needs atheris.
"""

import sys

import atheris

with atheris.instrument_imports(include=["varlen_graphs"]):
    import varlen_graphs  # noqa: F401

import torch

from tests import test_untrusted

PROPERTIES = [
    test_untrusted.test_whatever_comes_as_a_layout_is_refused_by_name_and_forgotten,
    test_untrusted.test_whatever_a_layout_on_the_device_says_is_found_there,
]


def one_input(data: bytes) -> None:
    """The first byte chooses the property, and the others are what hypothesis makes an example of."""
    if data:
        PROPERTIES[data[0] % len(PROPERTIES)].hypothesis.fuzz_one_input(data[1:])


if __name__ == "__main__":
    torch.set_num_threads(1)
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
