"""One forward, captured at every budget."""
