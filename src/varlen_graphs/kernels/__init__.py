"""Kernels, one folder per operation.

`reference.py` is the specification, in plain torch operations. `triton.py` holds the kernel and a launcher with the
same signature. `op.py` registers both as one torch operator, which runs the kernel on CUDA and the reference elsewhere;
it imports triton at the first launch. All operators can be captured: they do not sync with the host, and the shapes of
their results follow from integers.
"""

from varlen_graphs.kernels.rotary.op import apply_rotary

__all__ = ["apply_rotary"]
