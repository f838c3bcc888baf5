"""Chat templates: turn a conversation into its prompt text."""
