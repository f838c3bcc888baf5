"""Several routers as one: each tells the others of its own requests, and merges what they tell."""
