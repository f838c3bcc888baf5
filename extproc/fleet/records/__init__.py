"""The records of workers, which own all state about them, and the table that owns the records."""
