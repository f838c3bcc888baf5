"""Prompts become token ids: exactly the engine's, or none."""
