"""The wire formats of publishers, and their decoding to events."""
