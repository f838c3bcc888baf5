"""Asks a router for its health, for container and Kubernetes probes."""

import grpc

from extproc.pb.kvsteer_health_pb2 import HealthCheckRequest, HealthCheckResponse

TIMEOUT_SECONDS = 3.0


def fault_of(target: str) -> str | None:
    """What is wrong with the gRPC server at a host:port or unix:PATH, None if it serves."""
    # A proxy in the environment is not for a server on this machine.
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        try:
            status = check(HealthCheckRequest(), timeout=TIMEOUT_SECONDS).status
        except grpc.RpcError as error:
            return f"{target}: {error.code().name}"
    if status == HealthCheckResponse.SERVING:
        return None
    return f"{target}: {HealthCheckResponse.ServingStatus.Name(status)}"
