"""Whether the workers' tokens are those computed here, as they answer."""
