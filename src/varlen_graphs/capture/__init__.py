"""Capture and replay: CUDA graphs, and the tape that stands in for them on the CPU."""
