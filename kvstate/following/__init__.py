"""Following workers: their feeds, what they hold, and what is kept or passed on of it."""
