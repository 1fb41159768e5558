"""Window attention: boundaries of windows, and the order of merged tokens."""
