"""Turns prompts into token ids: exactly the engine's, or none."""
