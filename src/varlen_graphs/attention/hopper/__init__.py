"""Attention within long segments on NVIDIA Hopper: a kernel in CUDA, compiled at its first use, and its reference."""
