"""The workers: addresses, feeds, and where those are."""
