"""Tile schedule as a torch operator."""

from varlen_graphs.attention.tile_schedule import reference
from varlen_graphs.kernels.operator import launcher, operator

tile_schedule = operator(reference.tile_schedule, cuda=launcher(__package__, "tile_schedule"))
