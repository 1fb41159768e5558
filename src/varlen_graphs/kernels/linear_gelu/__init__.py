"""A linear layer and the GELU after it."""
