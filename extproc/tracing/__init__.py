"""OpenTelemetry, if it is configured: spans of decisions, and the metrics."""
