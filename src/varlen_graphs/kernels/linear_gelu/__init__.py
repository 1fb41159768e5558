"""Linear layer followed by GELU."""
