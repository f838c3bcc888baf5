"""Serves one engine's feed to many gateways."""
