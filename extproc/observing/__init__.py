"""Observes requests and workers: the figures behind /metrics, and the time of each phase."""
