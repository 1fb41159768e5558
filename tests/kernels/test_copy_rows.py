"""`copy_rows`, from an address: the reference, and the kernel in Triton's interpreter, or on a GPU where there is one."""

import torch

from tests.support.row_copies import check_kernel, check_reference
from varlen_graphs.kernels.copy_rows.op import copy_rows


def test_the_reference_copies_the_rows_and_clears_padding():
    check_reference()


def test_the_kernel_copies_the_rows_and_clears_padding(monkeypatch):
    from varlen_graphs.kernels.copy_rows import triton

    monkeypatch.setattr(triton, "MOST_PROGRAMS", 4)  # each of which then writes several blocks of some thousand rows
    check_kernel("cuda" if torch.cuda.is_available() else "cpu", most=5000)


def test_the_operator_is_sound_for_the_compiler():
    rows = torch.ones(3, 2)
    torch.library.opcheck(copy_rows, (torch.tensor([rows.data_ptr(), 2, 1, 4]), torch.tensor([0, 2]), torch.ones(5, 2)))
