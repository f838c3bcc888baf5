"""Tools beside a router, which it does not need to serve: the distribution `kvsteer-tools`.

`doctor` finds what is wrong, `whatif` plays recorded requests, `top` shows a running router,
`report` compares, `demo` runs all of it on one machine with the `simulator`, `bridge` serves a
feed, `envoy` adds KVSteer to an existing envoy.yaml, `completion` is for shells.

The router imports nothing of this, and finds the commands by their entry points
(`extproc.commands.tools`). In the other direction there is a small interface, whose names and
meanings stay as they are within a version:

- a configuration: `extproc.config` (`reader.load`, `schema.Config`), with `extproc.base`;
- a running router, by its HTTP servers: `extproc.commands.admin_client`, whose answers are typed in
  `extproc.commands.admin_json`, and what commands share;
- a request and its tokens: `extproc.requests`, `extproc.tokenizing.tokens`, `kvstate.overlap`;
- a decision: `extproc.routing.decide`, made for an `inputs.query.Query` on a view, which is an
  `inputs.snapshot.Snapshot` with loads and claims;
- a feed: `kvstate.feeds` delivers `kvstate.events`, which `kvstate.wire` decodes;
- Envoy's configuration: `extproc.envoy.envoy_config`.

Where a tool has to do exactly what the router does, such as asking a worker what it is, it imports
that part of the router. tests/test_layering.py lists both, with the reasons, and refuses others.
"""
