"""Lookup of the item of a row, shared by all kernels that read the item table."""
