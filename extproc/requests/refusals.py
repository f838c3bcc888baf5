"""Answers of the router itself, which refuse a request.

To a client of gRPC the status of HTTP says nothing. It gets "Trailers-Only": status 200, and the
outcome in the headers, without a body. Sources: gRPC over HTTP/2, "Responses" (Status-Message is
percent-encoded; the texts here need none of it); the status codes of gRPC.
"""

from typing import NamedTuple

import msgspec

from extproc.http2.codes import Status
from extproc.requests import grpc_request

# When a client that was refused because all workers are busy may try again.
RETRY_AFTER_SECONDS = 1

# When one may try again that waited in vain for room in the caches: soon, since it waits on then.
NO_ROOM_SECONDS = 5


class Refusal(NamedTuple):
    """An answer instead of a worker's; body is JSON, or empty to a client of gRPC.

    message: why, in words.
    """

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    message: str = ""


class _Reason(NamedTuple):
    """Why a request is refused.

    status, kind: of HTTP, and the name of the error in its body. grpc_status: of gRPC.
    """

    status: int
    kind: str
    grpc_status: Status
    message: str
    headers: tuple[tuple[str, str], ...] = ()


_RETRY = (("retry-after", str(RETRY_AFTER_SECONDS)),)
_BUSY = _Reason(
    429, "RateLimitError", Status.RESOURCE_EXHAUSTED, "all workers are busy; try again", _RETRY
)
_NO_ROOM = _Reason(
    429,
    "RateLimitError",
    Status.RESOURCE_EXHAUSTED,
    "live conversations fill the caches; try again, this one keeps its place",
    (("retry-after", str(NO_ROOM_SECONDS)),),
)
_UNAVAILABLE = _Reason(
    503, "ServiceUnavailableError", Status.UNAVAILABLE, "no worker can take this request"
)
_NO_OBJECT = _Reason(
    400, "BadRequestError", Status.INVALID_ARGUMENT, "the request body is not a JSON object"
)
_NO_MESSAGE = _Reason(
    400,
    "BadRequestError",
    Status.INVALID_ARGUMENT,
    "the request is not one uncompressed message of at most 512 fields",
)
_UNREAD = _Reason(
    413,
    "BadRequestError",
    Status.RESOURCE_EXHAUSTED,
    "the request body is too large, or was not sent whole",
)
_CROWDED = _Reason(
    429,
    "RateLimitError",
    Status.RESOURCE_EXHAUSTED,
    "too many large requests of this client wait for the router; try again",
    _RETRY,
)
_NO_TENANT = _Reason(
    403,
    "PermissionDeniedError",
    Status.PERMISSION_DENIED,
    "the request does not name one tenant",
)
_UNSALTED = _Reason(
    403,
    "PermissionDeniedError",
    Status.UNIMPLEMENTED,
    "this API cannot keep tenants apart",
)
_NO_RESPONSE = _Reason(
    404,
    "NotFoundError",
    Status.NOT_FOUND,
    "this tenant has no response with this id",
)
_NAMED_MEDIA = _Reason(
    400,
    "BadRequestError",
    Status.INVALID_ARGUMENT,
    "media that are named by uuid or hash cannot be kept apart; send them without",
)


def busy(path: str) -> Refusal:
    """Returns the answer while all workers are busy. path: of the request."""
    return _refusal(_BUSY, path)


def no_room(path: str) -> Refusal:
    """Returns the answer while live conversations fill the caches. path: of the request."""
    return _refusal(_NO_ROOM, path)


def unavailable(path: str) -> Refusal:
    """Returns the answer if no worker can take a request. path: its."""
    return _refusal(_UNAVAILABLE, path)


def refused_body(path: str) -> Refusal:
    """Returns the answer to a body that is not read with certainty, or that engines may read
    differently: no JSON object, or no message of gRPC."""
    return _refusal(_NO_MESSAGE if path in grpc_request.PATHS else _NO_OBJECT, path)


def unread_body(path: str) -> Refusal:
    """Returns the answer to a body that is not read whole, but would have to be changed."""
    return _refusal(_UNREAD, path)


def crowded_out(path: str) -> Refusal:
    """Returns the answer to a body for which there is no room among those that wait."""
    return _refusal(_CROWDED, path)


def refused_tenant(path: str) -> Refusal:
    """Returns the answer to a request that names no tenant, or several. path: of the request."""
    return _refusal(_NO_TENANT, path)


def unsalted_api(path: str) -> Refusal:
    """Returns the answer to a request whose blocks all tenants would share.

    path: of the request.
    """
    return _refusal(_UNSALTED, path)


def refused_response(path: str) -> Refusal:
    """Returns the answer to a request for a response that is not the tenant's. path: its."""
    return _refusal(_NO_RESPONSE, path)


def refused_media(path: str) -> Refusal:
    """Returns the answer to a request that names media which others may have sent. path: its."""
    return _refusal(_NAMED_MEDIA, path)


def _refusal(why: _Reason, path: str) -> Refusal:
    if path in grpc_request.PATHS:
        outcome = (("grpc-status", str(int(why.grpc_status))), ("grpc-message", why.message))
        headers = (("content-type", "application/grpc"), *outcome, *why.headers)
        return Refusal(200, headers, b"", why.message)
    error = {"message": why.message, "type": why.kind, "param": None, "code": why.status}
    body = msgspec.json.encode({"error": error})
    headers = (("content-type", "application/json"), *why.headers)
    return Refusal(why.status, headers, body, why.message)
