"""Resampling of bytes along one axis as a torch operator."""

from varlen_graphs.kernels.operator import launcher, operator
from varlen_graphs.kernels.resample import reference

resample = operator(reference.resample, cuda=launcher(__package__, "resample"))
