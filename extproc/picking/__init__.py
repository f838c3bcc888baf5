"""Which worker gets a request, and why."""
