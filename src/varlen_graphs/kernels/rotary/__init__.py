"""Rotary position embedding: the table of angles, and its application."""
