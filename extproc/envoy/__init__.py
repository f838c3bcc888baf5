"""Envoy's configuration: printed, patched, and kept up to date."""
