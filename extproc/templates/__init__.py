"""Chat templates: a conversation becomes its prompt text."""
