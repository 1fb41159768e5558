"""Residual sum followed by layer norm."""
