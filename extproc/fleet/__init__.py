"""The workers: their records, feeds, health and load."""
