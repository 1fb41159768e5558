"""How one call runs: packs of items with their budgets, or eager."""
