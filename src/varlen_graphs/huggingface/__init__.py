"""Whole Hugging Face models."""
