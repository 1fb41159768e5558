"""Residual sum followed by RMS norm."""
