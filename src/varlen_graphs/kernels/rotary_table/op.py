"""Cosines and sines of rotary position embedding as a torch operator."""

from varlen_graphs.kernels.operator import launcher, operator
from varlen_graphs.kernels.rotary_table import reference

rotary_table = operator(reference.rotary_table, cuda=launcher(__package__, "rotary_table"))
