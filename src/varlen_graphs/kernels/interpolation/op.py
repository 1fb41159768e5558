"""Resampling of a square table to grids of any size, as torch operators."""

from varlen_graphs.kernels.interpolation import reference
from varlen_graphs.kernels.operator import launcher, operator

interpolation_taps = operator(reference.interpolation_taps, cuda=launcher(__package__, "interpolation_taps"))
interpolate = operator(reference.interpolate, cuda=launcher(__package__, "interpolate"))
