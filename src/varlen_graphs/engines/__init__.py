"""Plugins for serving engines, which run the engines' own towers as graphs."""
