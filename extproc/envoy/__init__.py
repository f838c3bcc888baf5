"""Envoy's configuration: printed, and kept up to date."""
