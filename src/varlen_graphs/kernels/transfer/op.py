"""Copies of memory by address, as a torch operator."""

from varlen_graphs.kernels.operator import launcher, operator
from varlen_graphs.kernels.transfer import reference

transfer_memory = operator(
    reference.transfer_memory,
    fake=lambda *_: None,
    cuda=launcher(__package__, "transfer_memory"),
    changes=("transfers",),
)
