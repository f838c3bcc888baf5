"""Which modules are pure: no await, no clock, no socket, no randomness but as arguments."""

PURE = (
    "kvstate.core",
    "kvstate.core_choice",
    "kvstate.errors",
    "kvstate.events",
    "kvstate.feed",
    "kvstate.index",
    "kvstate.keys",
    "kvstate.orphans",
    "kvstate.overlap",
    "kvstate.plain_core",
    "kvstate.segment",
    "kvstate.tiers",
    "kvstate.zmq_wire",
    "extproc.address",
    "extproc.config",
    "extproc.decision",
    "extproc.errors",
    "extproc.headers",
    "extproc.load",
    "extproc.models",
    "extproc.pick",
    "extproc.request",
    "extproc.stream",
)

# Compiled, and as pure: its sources in kvstate/native include nothing that does I/O.
COMPILED = "kvstate._core"

# What a pure module may import besides pure modules and the standard library.
LIBRARIES = {"msgspec", "numpy", "xxhash", "google"}

# Parts of the standard library that bring in a clock, a socket, an event loop or chance.
IMPURE_STANDARD_LIBRARY = {"asyncio", "socket", "time", "random", "threading", "subprocess", "os"}
