"""Plugins for inference engines, which run the engines' own towers as graphs."""
