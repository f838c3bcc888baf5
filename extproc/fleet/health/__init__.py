"""Which workers answer: health probes, doubts, and sleeping engines."""
