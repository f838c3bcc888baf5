"""What publishers send, and how it becomes events."""
