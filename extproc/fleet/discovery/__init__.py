"""Finds workers while the router runs: the sources, and the view merged from all of them."""
