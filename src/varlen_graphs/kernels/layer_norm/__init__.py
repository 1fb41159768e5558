"""A residual sum and the layer norm after it."""
