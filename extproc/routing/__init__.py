"""Picks the worker for a request, and explains the choice."""
