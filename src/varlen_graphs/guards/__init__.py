"""Comparison of a module and of memory with what they were when graphs were captured."""
