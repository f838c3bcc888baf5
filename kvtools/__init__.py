"""Tools beside a router, which it does not need to serve: the distribution `kvsteer-tools`.

`doctor` finds what is wrong, `whatif` plays recorded requests, `top` shows a running router,
`report` compares, `demo` runs all of it on one machine with the `simulator`, `bridge` serves a
feed, `envoy` adds KVSteer to an existing envoy.yaml, `completion` is for shells.
"""
