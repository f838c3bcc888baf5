"""Why prompts are computed again, and who breaks the cache: `misses`."""
