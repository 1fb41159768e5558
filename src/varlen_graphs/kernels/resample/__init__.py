"""Resampling of bytes along one axis, as image libraries do it: with integers as weights."""
