"""Where rows lie in their items."""
