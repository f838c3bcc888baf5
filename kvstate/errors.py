"""The tree of errors; each name says who is at fault.

KVSteerError
├── PeerError           its text may quote the peer, made printable
│   ├── WireError       a publisher sent bytes that are not an event batch
│   └── ReplayError     a publisher did not answer a replay, or not completely
├── DamagedError        a state file is not whole, or of no use here
└── (extproc.base.errors)
    ├── ConfigError     the operator's configuration cannot be used
    ├── RequestError    a client's request cannot be keyed; it is still routed, by load
    ├── DiscoveryError  a source of workers cannot be queried now
    ├── ProtocolError   the proxy broke the ext_proc protocol, or speaks another dialect
    └── StartError      this machine refuses something: a port, a file, a permission
        └── ExtraError  a feature's packages are not installed
"""


class KVSteerError(Exception):
    """Root of everything that KVSteer raises on purpose."""


MAX_PEER_TEXT = 200


def printable(text: str, limit: int = MAX_PEER_TEXT) -> str:
    """Returns a peer's text as one printable line of limited length, for logs and pages.

    With line breaks or terminal control codes, a peer could forge log lines.
    """
    line = " ".join(text[: 2 * limit].split())
    if not line.isprintable():
        line = "".join(each if each.isprintable() else "?" for each in line)
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


class PeerError(KVSteerError):
    """A peer is at fault; the text may quote it, made printable."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


class WireError(PeerError):
    """A publisher sent bytes that are not an event batch."""


class ReplayError(PeerError):
    """A publisher did not answer a replay, or not completely."""


class DamagedError(KVSteerError):
    """A state file is not whole, or of no use here; the text says why, and quotes nothing of it."""
