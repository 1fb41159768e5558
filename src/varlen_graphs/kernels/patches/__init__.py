"""Patches of images, from their bytes."""
