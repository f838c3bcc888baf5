"""The request side of the exception tree; kvstate.errors shows the whole."""

import contextlib
from collections.abc import Iterator

from kvstate.errors import KVSteerError, PeerError

# Extras that are imported only where they are used, and their packages. OpenTelemetry's is not one:
# its packages share a namespace, which may be there without those that are needed.
EXTRAS = {
    "envoy": ("envoy_data_plane", "betterproto2"),
    "grpc": ("grpc",),
    "kubernetes": ("kubernetes_asyncio",),
    "sharing": ("valkey", "libvalkey"),
}


class ConfigError(KVSteerError):
    """The configuration cannot be used.

    faults: one line each, "file: key: what is wrong"; all faults of one run.
    """

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class RequestError(KVSteerError):
    """A request cannot be keyed, so it is routed by its texts, its session, or load.

    reason: the short name under which it is counted and shown, out of a fixed set: no prompt text.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class UnclearError(KVSteerError):
    """The body of a client's request is not read with certainty, where it may have to be changed.

    reason: the short name under which it is counted, out of a fixed set: no text of the body.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class UnknownModelError(KVSteerError):
    """Who asks names a model that is not configured, or none. name: as it was asked for."""

    def __init__(self, name: str) -> None:
        super().__init__("no model is named that is known here")
        self.name = name


class StartError(KVSteerError):
    """Something needed to start is not available: a port, a file, a permission."""


class ExtraError(StartError):
    """A feature is used whose extra is not installed.

    what: the feature, as its user names it: a command or a key. extras: the missing ones' names.
    """

    def __init__(self, what: str, *extras: str) -> None:
        needs = "needs the extra" if len(extras) == 1 else "need extras"
        super().__init__(f"{what}: {needs}: pip install '.[{','.join(extras)}]' in a clone")


@contextlib.contextmanager
def importing_extra(what: str, extra: str) -> Iterator[None]:
    """Imports packages of an extra.

    what: the feature that needs them, as its user names it.

    Raises:
        ExtraError: one of the packages is not installed.
        StartError: one of them is installed, but does not load, such as one for another platform.
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS[extra]:
            raise
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise ExtraError(what, extra) from None
        raise StartError(f"{what}: {package} is installed, but does not load: {error}") from error


class DiscoveryError(PeerError):
    """A source of workers is not available now; the text says why."""


class ProtocolError(KVSteerError):
    """The proxy sent an unexpected ext_proc message, or speaks another dialect."""


class CallError(KVSteerError):
    """A gRPC call ends with this status code; the text is sent to the peer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class ReportError(KVSteerError):
    """A file or answer is no report; the text says why, to follow its name in a message."""
