"""What a SwiGLU does between its matrix products."""
