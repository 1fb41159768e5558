"""Kernels, one folder an operation. `reference.py` is the specification, in plain torch operations."""
