"""What a captured forward must not do, and what graphs depend on."""
