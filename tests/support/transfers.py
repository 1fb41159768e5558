"""Transfers between random blocks of memory, for the reference and the kernel."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from varlen_graphs.kernels.transfer import reference

sizes = st.lists(st.sampled_from([0, 1, 2, 7, 1023, 1024, 1025, 5000]), min_size=1, max_size=4)


def run_transfers(transfer, counts, spare, device="cpu"):
    """Transfer blocks of `counts` integers of 8 bytes into the middle of larger ones; return sources and targets."""
    sources = [torch.randint(-(2**63), 2**63 - 1, (count,), device=device) for count in counts]
    targets = [torch.full((count + 2,), 7, device=device) for count in counts]
    pairs = zip(sources, targets, strict=True)
    transfers = torch.tensor([[x.data_ptr(), y.data_ptr() + 8, x.nbytes, 0] for x, y in pairs], device=device)
    transfer(transfers, 8 * (max(counts) + spare))
    before = [target.clone() for target in targets]
    for target in targets:
        target.fill_(7)
    spent = [target.clone() for target in targets]
    transfer(transfers, 8 * (max(counts) + spare))  # copies nothing again
    assert all(map(torch.equal, targets, spent))
    assert transfers[:, 2:].count_nonzero() == 0
    return sources, before


def check_transfers(transfer, device="cpu"):
    """Check that transfers copy exactly what they should, once, whatever the sizes."""

    @settings(max_examples=40, deadline=None, database=None)
    @given(sizes, st.sampled_from([0, 3000, 2_000_000]))
    def check(counts, spare):
        sources, targets = run_transfers(transfer, counts, spare, device)
        for source, target in zip(sources, targets, strict=True):
            assert torch.equal(target[1:-1], source)
            assert target[[0, -1]].tolist() == [7, 7]

    check()


def check_kernel(device):
    """Check the kernel."""
    from varlen_graphs.kernels.transfer import triton

    check_transfers(triton.transfer_memory, device)


def check_reference():
    """Check the reference."""
    check_transfers(reference.transfer_memory)
