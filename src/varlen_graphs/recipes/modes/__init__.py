"""Torch function modes of recipes: forwards of transformers run under them in graphs, unmodified."""
