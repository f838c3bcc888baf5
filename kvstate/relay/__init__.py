"""Several processes on one host: one follows the feeds, and passes what it learns to the others."""
