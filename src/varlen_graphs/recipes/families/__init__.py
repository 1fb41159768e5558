"""Recipes of families of towers by name, one thin file each."""
