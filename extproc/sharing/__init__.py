"""Several routers as one: each reports its own requests to the others, and merges their reports."""
