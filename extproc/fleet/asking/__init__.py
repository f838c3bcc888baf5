"""Asking workers over HTTP: the client, the schedule, and how long an answer is awaited."""
