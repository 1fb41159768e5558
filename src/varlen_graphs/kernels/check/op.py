"""Validation of items that the host has not seen, as a torch operator."""

from varlen_graphs.kernels.check import reference
from varlen_graphs.kernels.operator import launcher, operator

check_items = operator(
    reference.check_items,
    fake=lambda *_: None,
    cuda=launcher(__package__, "check_items"),
    changes=("table", "status", "nan_mask"),
)
