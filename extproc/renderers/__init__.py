"""Renders conversations as engines do in code, for models that have no chat template."""
