"""The operator's HTTP server with the live page, and the HTTP server for metrics.

docs/internals/admin-api.md has the routes.
"""
