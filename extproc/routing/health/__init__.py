"""Whether an endpoint answers: evidence, ejections, and when to probe."""
