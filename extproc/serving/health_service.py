"""The answers of the server to grpc.health.v1.Health.

Source: grpc/grpc, doc/health-checking.md.
"""

from collections.abc import Callable

from extproc.pb.kvsteer_health_pb2 import HealthCheckResponse

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"

# The service names that have a status, besides EXT_PROC and "", which is the whole server.
LIVENESS = "liveness"
READINESS = "readiness"

# Longest delay before watchers are notified of a change.
WATCH_SECONDS = 0.5

ServingStatus = HealthCheckResponse.ServingStatus


class Health:
    """The health that a server reports.

    is_stopping: the server no longer serves, and ends the calls of watchers.
    """

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self.is_stopping = False
        self._is_ready = is_ready

    def status_of(self, service: str) -> ServingStatus:
        """Returns the status of a service; SERVICE_UNKNOWN if the name is unknown."""
        if service == LIVENESS:
            return HealthCheckResponse.SERVING
        if service in ("", READINESS, EXT_PROC):
            is_serving = self._is_ready() and not self.is_stopping
            return HealthCheckResponse.SERVING if is_serving else HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse.SERVICE_UNKNOWN
