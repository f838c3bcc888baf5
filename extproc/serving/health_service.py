"""What both servers answer to grpc.health.v1.Health.

Source: grpc/grpc, doc/health-checking.md.
"""

from collections.abc import Callable

from extproc.pb.kvsteer_health_pb2 import HealthCheckResponse

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"

# Names under which health is asked for; "" is the whole server.
LIVENESS = "liveness"
READINESS = "readiness"

# A change is told to those who watch after at most this.
WATCH_SECONDS = 0.5

ServingStatus = HealthCheckResponse.ServingStatus


class Health:
    """The health that a server reports.

    is_stopping: it serves no more, and those who watch it are sent away.
    """

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self.is_stopping = False
        self._is_ready = is_ready

    def of(self, service: str) -> ServingStatus:
        """Returns the status of a service; SERVICE_UNKNOWN if there is none of that name."""
        if service == LIVENESS:
            return HealthCheckResponse.SERVING
        if service in ("", READINESS, EXT_PROC):
            is_serving = self._is_ready() and not self.is_stopping
            return HealthCheckResponse.SERVING if is_serving else HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse.SERVICE_UNKNOWN
