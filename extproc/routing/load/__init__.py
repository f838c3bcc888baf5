"""How much work each endpoint has, and how fast it does it."""
