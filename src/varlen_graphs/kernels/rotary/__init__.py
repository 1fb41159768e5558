"""The application of rotary position embedding."""
