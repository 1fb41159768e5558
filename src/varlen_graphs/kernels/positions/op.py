"""Positions of rows in their items as a torch operator."""

from varlen_graphs.kernels.operator import launcher, operator
from varlen_graphs.kernels.positions import reference

positions = operator(reference.positions, cuda=launcher(__package__, "positions"))
