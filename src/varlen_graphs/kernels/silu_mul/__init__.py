"""Elementwise part of SwiGLU, between its matrix products."""
