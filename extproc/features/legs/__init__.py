"""Requests that other workers have a part in: `disaggregation`."""
