"""`kvsteer demo`: a fleet of simulated workers, a router and a real Envoy on this machine."""
