"""The declaration of a module, and calls by it."""
