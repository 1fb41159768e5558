"""Kernels, one folder per operation.

`reference.py` is the specification, in plain torch operations. `triton.py` holds the kernel and a launcher with the
same signature. `op.py` registers both as one torch operator, which runs the kernel on CUDA and the reference elsewhere;
it imports triton at the first launch. All operators can be captured: they do not sync with the host, and the shapes of
their results follow from integers.

References share some arguments. `values` is an item table, int64 `[items, 3 + columns]` of `(t, h, w, *columns)`, zeros
in padding items. `rows` and `segments` are those of the budget, padding included. The rows of a frame are ordered in
blocks of `merge * merge`; 1 is raster order. `axes` names coordinates, separated by spaces: `"t"`, `"h"`, `"w"` and
`"row"`, the index in the item.
"""

from varlen_graphs.kernels.rotary.op import apply_rotary

__all__ = ["apply_rotary"]
