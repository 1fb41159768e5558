"""Cosines and sines of rotary position embedding."""
