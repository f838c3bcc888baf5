"""Starts and stops the router: its parts, its processes, its event loop."""
