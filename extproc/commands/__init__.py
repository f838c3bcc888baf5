"""The commands of `kvsteer`, a module or folder each.

They are the tools around a router: what is wrong (`doctor`), what another policy would have done
(`whatif`), what happens now (`top`), a fleet to try it with (`demo`), a feed for others (`bridge`).
`extproc.__main__` has their arguments, and imports a command only when it runs.

A command may know everything below it, and only the command line imports one. It talks to a running
router as anybody does, by its HTTP servers (`admin_client`).

The rules: texts from outside are made harmless before a terminal shows them (`terminal`). What a
command concludes is computed apart from what it asks and prints, and what it says is wrong comes
with what to do.
"""
