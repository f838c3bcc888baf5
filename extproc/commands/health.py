"""Asks a router whether it is ready, for the probes of containers and Kubernetes."""

from dataclasses import dataclass
from pathlib import Path

import grpc

from extproc.base.errors import StartError
from extproc.pb.kvsteer_health_pb2 import HealthCheckRequest, HealthCheckResponse

TIMEOUT_SECONDS = 3.0

_MAX_DETAILS = 300


@dataclass(frozen=True, slots=True)
class ClientTls:
    """How to check a router that serves TLS; all but the name are PEM files.

    ca: the authorities that may have issued the router's certificate. name: the name in that
    certificate, if it differs from the host asked. certificate, key: the client's own, if the
    router requires one.
    """

    ca: str
    name: str | None = None
    certificate: str | None = None
    key: str | None = None


def fault_of(target: str, tls: ClientTls | None = None) -> str | None:
    """Returns what is wrong with the gRPC server at a host:port or unix:PATH, None if it serves.

    Raises:
        StartError: one of the files cannot be read.
    """
    with _channel(target, tls) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        try:
            status = check(HealthCheckRequest(), timeout=TIMEOUT_SECONDS).status
        except grpc.RpcError as error:
            return f"{target}: {_error_line(error)}"
    if status == HealthCheckResponse.SERVING:
        return None
    return f"{target}: {HealthCheckResponse.ServingStatus.Name(status)}"


def _channel(target: str, tls: ClientTls | None) -> grpc.Channel:
    # The environment's proxy must not be used for a server on this machine.
    options: list[tuple[str, str | int]] = [("grpc.enable_http_proxy", 0)]
    if tls is None:
        return grpc.insecure_channel(target, options)
    if tls.name is not None:
        options.append(("grpc.ssl_target_name_override", tls.name))
    credentials = grpc.ssl_channel_credentials(
        _content(tls.ca),
        None if tls.key is None else _content(tls.key),
        None if tls.certificate is None else _content(tls.certificate),
    )
    return grpc.secure_channel(target, credentials, options)


def _error_line(error: grpc.RpcError) -> str:
    """Returns the status and details of a failed call, in one line."""
    details = " ".join((error.details() or "").split())[:_MAX_DETAILS]
    return ": ".join(filter(None, (error.code().name, details)))


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StartError(f"{path}: {error.strerror}") from None
