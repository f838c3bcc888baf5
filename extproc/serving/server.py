"""Which gRPC server serves."""

from collections.abc import Callable
from typing import Protocol

from extproc.serving.certificates import Certificates
from extproc.serving.exchange import Service
from extproc.serving.grpc_server import GrpcServer
from extproc.serving.lean_server import LeanServer


class Server(Protocol):
    """A server of ext_proc and gRPC health on `extproc.listen`."""

    async def start(self) -> None:
        """Listens.

        Raises:
            StartError: the address cannot be bound.
        """

    async def stop(self) -> None:
        """Takes no new streams and gives those under way `extproc.drain_ms`."""


def server_for(
    service: Service, is_ready: Callable[[], bool], certificates: Certificates | None = None
) -> Server:
    """The one that the configuration names.

    certificates: to speak TLS with; plain text without them.
    """
    if service.config.extproc.server == "lean":
        return LeanServer(service, is_ready, certificates=certificates)
    return GrpcServer(service, is_ready, certificates)
