"""Copies of memory by address: the reference, and the kernel in Triton's interpreter."""

import os
import subprocess
import sys

import torch

from tests.support.transfers import check_reference
from varlen_graphs.kernels.transfer.op import transfer_memory


def test_the_reference_copies_each_block_once():
    check_reference()


def test_the_kernel_copies_each_block_once():
    """In Triton's interpreter, which must be chosen before the kernel is imported."""
    code = "import tests.support.transfers as t; t.check_kernel('cpu')"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"TRITON_INTERPRET": "1"})


def test_the_operator_is_sound_for_the_compiler():
    torch.library.opcheck(transfer_memory, (torch.zeros(3, 4, dtype=torch.int64), 64))
