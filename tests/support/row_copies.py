"""Copies of rows from addresses, for the reference and the kernel."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from varlen_graphs.kernels.copy_rows import reference

KINDS = [(torch.float32, (2,)), (torch.bfloat16, (12,)), (torch.int64, ()), (torch.uint8, (8, 3)), (torch.bool, (2, 4))]
"""Dtypes and shapes of rows that graphs copy."""


def forms_of(rows):
    """Return the rows in memory of every kind."""
    zeros = torch.zeros_like(rows)
    beside = torch.cat([zeros[:1].view(-1)[:1], rows.reshape(-1)])[1:].view_as(rows)
    return {
        "as they are": rows,
        "within others": torch.cat([zeros, rows, zeros])[len(rows) : 2 * len(rows)],
        "off the unit": beside,
        "in columns": rows.t().contiguous().t(),
        "of a wider tensor": torch.cat([zeros, rows, zeros], 1)[:, 8:16],
        "negated in memory": torch._neg_view(-rows),
        "double": rows.double(),
        "half": rows.bfloat16().float().bfloat16(),
        "a parameter": nn.Parameter(rows, requires_grad=False),
        "copied when written": torch._lazy_clone(rows),
    }


def check_copies(copy_rows, device="cpu", most=300_000):
    """Check that the rows that are asked for come from where they lie, that padding is cleared, and no other row."""

    @settings(max_examples=30, deadline=None, database=None)
    @given(
        st.sampled_from(KINDS),
        st.sampled_from([0, 1, 7, 1023, 1024, 1025, 5000]),
        st.sampled_from([0, 1, 3000, most]),
        st.integers(0, 2),
        st.sampled_from(["first", "first, with places", "at places"]),
        st.sampled_from([0, 1, 2999, most]),
    )
    def check(kind, count, spare, first, which, between):
        dtype, shape = kind
        memory = torch.randint(2, (first + 2 * count + 1, *shape), device=device).to(dtype)
        rows = torch.ones(count + spare, *shape, dtype=dtype, device=device)
        indices = torch.randperm(2 * count, device=device)[:count].sort().values
        address = memory.data_ptr() + first * memory[0].nbytes
        padding = count + between
        source = torch.tensor([address, count, int(which == "at places"), padding], device=device)
        wanted = indices if which == "at places" else torch.arange(count, device=device)
        copy_rows(source, indices[:0] if which == "first" else indices, rows)
        assert torch.equal(rows[:count], memory[first:][wanted])
        assert (rows[count:padding] == 1).all()
        assert not rows[padding:].any()

    check()


def check_kernel(device, most=300_000):
    """Check the kernel."""
    from varlen_graphs.kernels.copy_rows import triton

    check_copies(triton.copy_rows, device, most)


def check_reference():
    """Check the reference."""
    check_copies(reference.copy_rows)
