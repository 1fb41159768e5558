"""A residual sum and the RMS norm after it."""
