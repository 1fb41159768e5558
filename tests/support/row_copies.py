"""Copies of rows from addresses, for the reference and the kernel."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from varlen_graphs.kernels.copy_rows import reference

KINDS = [(torch.float32, (2,)), (torch.bfloat16, (4,)), (torch.int64, ()), (torch.uint8, (8, 3)), (torch.bool, (2, 4))]
"""Dtypes and shapes of rows that graphs copy."""


def check_copies(copy_rows, device="cpu"):
    """Check that exactly the rows that there are come from where they lie, whatever their number."""

    @settings(max_examples=60, deadline=None, database=None)
    @given(
        st.sampled_from(KINDS),
        st.sampled_from([0, 1, 7, 1023, 1024, 1025, 5000]),
        st.sampled_from([0, 1, 3000, 300_000]),
        st.integers(0, 2),
    )
    def check(kind, count, spare, first):
        dtype, shape = kind
        memory = torch.randint(2, (first + count + 1, *shape), device=device).to(dtype)
        rows = torch.ones(count + spare, *shape, dtype=dtype, device=device)
        each = memory[0].nbytes
        copy_rows(torch.tensor([memory.data_ptr() + first * each, count * each], device=device), rows)
        assert torch.equal(rows[:count], memory[first : first + count])
        assert (rows[count:] == 1).all()

    check()


def check_kernel(device):
    """Check the kernel."""
    from varlen_graphs.kernels.copy_rows import triton

    check_copies(triton.copy_rows, device)


def check_reference():
    """Check the reference."""
    check_copies(reference.copy_rows)
