"""Runs of modules on small batches, from which recipes tell how to declare them."""
