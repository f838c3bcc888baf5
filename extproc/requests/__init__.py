"""Parses the requests of every API, as far as needed to find their prompts."""
