"""Between the proxy and the router: the servers, and what they say on one stream."""
