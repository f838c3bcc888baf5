"""OpenTelemetry, if it is asked for: spans of decisions, and the metrics."""
