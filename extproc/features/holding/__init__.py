"""Requests that wait while live conversations fill the caches: `policy.hold`."""
