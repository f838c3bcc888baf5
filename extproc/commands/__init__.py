"""The commands of `kvsteer` that a router needs, and how all commands are told what to do.

`extproc.__main__` has the arguments of `serve`, `check`, `envoy`, `explain` and `health`. All other
commands are tools beside the router, which come with the distribution `kvsteer-tools` (`tools`).
Tools may import this room: how to name a configuration (`config_file`) or a running router
(`router_url`), how to ask one (`admin_client`), and how a terminal shows the answer (`layout`,
`terminal`).

The rules: only the command line imports a command, and only when it runs. A command talks to a
running router as anybody does, by its HTTP servers. Texts from outside are made harmless before a
terminal shows them.
"""
