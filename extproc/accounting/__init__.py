"""What became of requests: statuses, times, and the cached tokens that engines report."""
