"""Kernels, one folder an operation.

`reference.py` is the specification, in plain torch operations. `triton.py` holds the kernel and a launcher of the same
signature. `op.py` makes both one operator of torch, which runs the kernel on CUDA and the reference elsewhere; it
imports triton when the kernel is first launched. All of them can be captured: no host syncs, and the shapes of results
follow from integers.
"""

from varlen_graphs.kernels.rotary.op import apply_rotary

__all__ = ["apply_rotary"]
