"""Feeds: transports, the rules for sequence numbers, and the loop that follows a feed."""
