"""Validation of the item table on the device where it lies."""
