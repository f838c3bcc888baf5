"""What goes to OpenTelemetry, where that is asked for: spans of decisions, and the metrics."""
