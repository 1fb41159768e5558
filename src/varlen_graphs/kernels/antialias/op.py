"""Antialiased resampling of a square table as a torch operator."""

from varlen_graphs.kernels.antialias import reference
from varlen_graphs.kernels.operator import launcher, operator

antialias = operator(reference.antialias, cuda=launcher(__package__, "antialias"))
