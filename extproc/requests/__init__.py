"""What requests ask of a model: every API, parsed as far as the prompt needs."""
