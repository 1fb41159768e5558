"""Where segments begin."""
