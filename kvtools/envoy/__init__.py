"""`kvsteer envoy --patch`: adds KVSteer to an envoy.yaml that somebody wrote."""
