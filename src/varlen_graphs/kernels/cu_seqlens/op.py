"""Boundaries of segments as a torch operator."""

from varlen_graphs.kernels.cu_seqlens import reference
from varlen_graphs.kernels.operator import launcher, operator

cu_seqlens = operator(reference.cu_seqlens, cuda=launcher(__package__, "cu_seqlens"))
