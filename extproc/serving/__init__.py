"""Between the proxy and the router: the servers, and the messages of one stream."""
