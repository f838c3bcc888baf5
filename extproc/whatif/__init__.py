"""`kvsteer whatif`: recorded requests over a simulated fleet, by the router's own decision."""
