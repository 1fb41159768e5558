"""Encoders on several GPUs, over `torch.distributed`."""

from varlen_graphs.parallel.data import DataParallelEncoder
from varlen_graphs.parallel.tensor import TensorParallelEncoder, tensor_plan

__all__ = ["DataParallelEncoder", "TensorParallelEncoder", "tensor_plan"]
