"""The request side of the exception tree; kvstate.errors shows the whole."""

from kvstate.errors import KVSteerError, PeerError


class ConfigError(KVSteerError):
    """The configuration cannot be used.

    faults: one line each, "file: key: what is wrong"; all that were found in one run.
    """

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class RequestError(KVSteerError):
    """A request cannot be keyed, and is routed by load.

    reason: the short name under which it is counted and shown; never holds prompt text.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class StartError(KVSteerError):
    """This machine refuses something needed to start: a port, a file, a permission."""


class DiscoveryError(PeerError):
    """A source of workers cannot be asked now; the text says why."""


class ProtocolError(KVSteerError):
    """The proxy sent an ext_proc message that does not belong there, or speaks another dialect."""


class Http2Error(KVSteerError):
    """A peer broke HTTP/2 so that its connection ends; code: of RFC 9113, section 7."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class CallError(KVSteerError):
    """A gRPC call ends; status: its code. The text goes to the peer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class ReportError(KVSteerError):
    """What was read is no report; the text says why, and goes behind its name."""
