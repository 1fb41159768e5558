"""The cosines and sines of rotary position embedding."""
