"""Errors, as one tree; each name says who is at fault.

KVSteerError
├── WireError           a publisher sent bytes that are no event batch
├── ReplayError         a publisher did not answer a replay, or not completely
└── (extproc.errors)
    ├── ConfigError     the operator's configuration cannot be used
    ├── RequestError    a client's request cannot be keyed; it is still routed, by load
    ├── DiscoveryError  a source of workers cannot be asked now
    ├── ProtocolError   the proxy broke the ext_proc protocol, or speaks another dialect
    └── StartError      this machine refuses something: a port, a file, a permission
"""


class KVSteerError(Exception):
    """Root of everything that KVSteer raises on purpose."""


class WireError(KVSteerError):
    """A publisher sent bytes that are no event batch."""


class ReplayError(KVSteerError):
    """A publisher did not answer a replay, or not completely."""
