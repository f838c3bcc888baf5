"""The tree of errors; each name says who is at fault.

KVSteerError
├── PeerError           its text may quote the peer, made printable
│   ├── WireError       a publisher sent bytes that are not an event batch
│   └── ReplayError     a publisher did not answer a replay, or not completely
├── DamagedError        a state file is not whole, or of no use here
├── NotBuiltError       a compiled core is missing, or does not load
├── MembersError        the members of a client's body are not known
│   ├── NoObjectError   it is no object in UTF-8
│   └── ManyMembersError  it has more members of some names than are looked at
└── (extproc.base.errors)
    ├── ConfigError     the operator's configuration cannot be used
    ├── RequestError    a client's request cannot be keyed; it is still routed, by load
    ├── UnclearError    a client's body may have to be changed, and is not read with certainty
    ├── UnknownModelError  who asks names a model that is not configured
    ├── DiscoveryError  a source of workers cannot be queried now
    ├── ProtocolError   the proxy broke the ext_proc protocol, or speaks another dialect
    └── StartError      this machine refuses something: a port, a file, a permission
        └── ExtraError  a feature's packages are not installed
"""

import contextlib
from collections.abc import Iterator

# What is compiled: the index, and the request path.
CORES = ("kvstate._core", "extproc._core")


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


class NotBuiltError(KVSteerError, ImportError):
    """A compiled core, which everything needs, is missing or does not load.

    fault: of the import.
    """

    def __init__(self, fault: ImportError) -> None:
        why = "is missing" if isinstance(fault, ModuleNotFoundError) else f"does not load: {fault}"
        super().__init__(
            f"the compiled core {fault.name} {why}. In a clone, `make demo` builds it, and installs"
            " a compiler where there is none. Without building anything: install a wheel, or run"
            " `docker compose up`"
        )


@contextlib.contextmanager
def importing_cores() -> Iterator[None]:
    """Imports from the compiled cores.

    Raises:
        NotBuiltError: one of them is missing, or does not load.
    """
    try:
        yield
    except ImportError as error:
        if error.name not in CORES:
            raise
        raise NotBuiltError(error) from error


class MembersError(KVSteerError):
    """The members of a body that were asked for are not known: who goes on must not assume any."""


class NoObjectError(MembersError):
    """A body is no JSON object in UTF-8: no decoder of Python reads one in these bytes as UTF-8."""


class ManyMembersError(MembersError):
    """An object has more members of the names that were asked for than any client writes."""
