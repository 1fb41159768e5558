"""Encoders on several GPUs, by `torch.distributed`."""

from varlen_graphs.parallel.data import DataParallelEncoder

__all__ = ["DataParallelEncoder"]
