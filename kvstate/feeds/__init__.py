"""Feeds: transports, what their numbers allow to believe, and the loop that follows them."""
