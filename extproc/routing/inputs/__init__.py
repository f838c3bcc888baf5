"""What a decision is made from, besides the request: its query and a snapshot of the fleet."""
