"""Cost: what an operator takes, on which device."""
