"""The workers' feeds, and what they show of ranks and of reuse."""
