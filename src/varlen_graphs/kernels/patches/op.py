"""Patches of images as a torch operator."""

from varlen_graphs.kernels.operator import launcher, operator
from varlen_graphs.kernels.patches import reference

patches = operator(reference.patches, cuda=launcher(__package__, "patches"))
