"""The copy of rows from an address: the reference, and the kernel in Triton's interpreter."""

import os
import subprocess
import sys

import torch

from tests.support.row_copies import check_reference
from varlen_graphs.kernels.copy_rows.op import copy_rows


def test_the_reference_copies_the_rows_and_clears_padding():
    check_reference()


def test_the_kernel_copies_the_rows_and_clears_padding():
    """In Triton's interpreter, which must be chosen before the kernel is imported."""
    code = "import tests.support.row_copies as t; t.check_kernel('cpu')"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"TRITON_INTERPRET": "1"})


def test_the_operator_is_sound_for_the_compiler():
    rows = torch.ones(3, 2)
    torch.library.opcheck(copy_rows, (torch.tensor([rows.data_ptr(), 2, 1, 4]), torch.tensor([0, 2]), torch.ones(5, 2)))
