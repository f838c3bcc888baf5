"""`kvsteer whatif`: plays recorded requests on a simulated fleet with the router's decisions."""
