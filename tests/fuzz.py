"""The properties of tests of untrusted layouts and damaged files, guided by coverage: `python -m tests.fuzz`.

Takes the options of libFuzzer. Needs atheris.
"""

import sys

import atheris

with atheris.instrument_imports(include=["varlen_graphs"]):
    import varlen_graphs  # noqa: F401

import torch

from tests.calls import test_damaged_files
from tests.layouts import test_untrusted

PROPERTIES = [
    test_untrusted.test_whatever_comes_as_a_layout_is_refused_by_name_and_forgotten,
    test_untrusted.test_whatever_a_layout_on_the_device_says_is_found_there,
    test_damaged_files.test_whatever_is_in_a_file_is_read_or_refused_by_name,
]
OPTIONS = ["-len_control=0", "-max_len=1024"]
"""Examples take some hundred bytes from the first."""

tried = 0


def one_input(data: bytes) -> None:
    """The first byte chooses the property, and the others are what hypothesis makes an example of, if they suffice."""
    global tried
    if data and PROPERTIES[data[0] % len(PROPERTIES)].hypothesis.fuzz_one_input(data[1:]) is not None:
        tried += 1
        if tried % 1000 == 0:
            print(f"{tried} layouts and files tried", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    atheris.Setup([sys.argv[0], *OPTIONS, *sys.argv[1:]], one_input)
    atheris.Fuzz()
