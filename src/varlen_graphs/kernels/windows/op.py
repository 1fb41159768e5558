"""Boundaries and order of windows as torch operators."""

from varlen_graphs.kernels.operator import launcher, operator
from varlen_graphs.kernels.windows import reference

cu_window_seqlens = operator(reference.cu_window_seqlens, cuda=launcher(__package__, "cu_window_seqlens"))
window_index = operator(reference.window_index, cuda=launcher(__package__, "window_index"))
