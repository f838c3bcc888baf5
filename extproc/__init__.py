"""What to do with a request: parse, tokenize, pick a worker, and tell Envoy."""
