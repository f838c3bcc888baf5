"""Stores that workers share, and those that publish events of their own."""
