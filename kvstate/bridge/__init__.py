"""One engine's feed for many gateways."""
