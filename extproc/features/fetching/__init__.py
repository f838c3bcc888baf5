"""Fetching: workers that get KV blocks from others, or from stores, instead of computing them."""
