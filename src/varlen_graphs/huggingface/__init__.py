"""Wrapping of whole Hugging Face models."""
