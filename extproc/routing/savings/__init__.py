"""How many tokens of a request each worker would not have to compute, and why."""
