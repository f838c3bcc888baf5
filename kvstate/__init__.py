"""The workers' caches: their KV-cache events, the feeds that carry them, and the block index."""
