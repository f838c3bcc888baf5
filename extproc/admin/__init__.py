"""The operator's HTTP server, with the live page, and the scrapers' beside it; docs/admin.md."""
