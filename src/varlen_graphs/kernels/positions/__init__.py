"""Positions of rows in their items."""
