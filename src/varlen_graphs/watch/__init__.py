"""Rules for captured forwards, and guards on the memory and attributes that graphs depend on."""
