"""Frames cut into windows: where these begin, and which merged token is where."""
