"""Parses the requests of every API, as far as their prompts need."""
