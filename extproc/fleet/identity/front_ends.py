"""Asks a worker which front end serves its HTTP: the engine's Python one, or one in Rust.

A front end in Rust tells no name and the same release. vLLM's (0.33) answers 501 to what only the
Python one serves, and says so; SGLang's (0.5.23) lacks paths that its Python one keeps. Whatever is
not that is taken for Python, but for a failure, which tells nothing.

Source: vLLM 0.33.0, rust/src/server/src/routes.rs; SGLang 0.5.23, srt/entrypoints/http_server.py
and srt/rust_server.
"""

import msgspec

from extproc.base.engine import PYTHON, RUST, SGLANG, VLLM
from extproc.fleet.asking.polling import TIMEOUT_SECONDS, Client
from kvstate.undecodable import UNDECODABLE

# What vLLM's Rust front end refuses. The first may need a key; 0.33 serves the second without one,
# and it changes nothing.
MESSAGES, ELASTIC = "/v1/messages", "/is_scaling_elastic_ep"

# What SGLang's lacks.
_OF_PYTHON = ("/get_server_info", "/openapi.json")

# How a refusal names the front end.
_NAMED = "rust frontend"

_MAX_BYTES = 4_096

_NOT_FOUND, _NOT_IMPLEMENTED, _TOO_MANY_REQUESTS, _SERVER_ERROR = 404, 501, 429, 500
_KEY_NEEDED = (401, 403)


class FrontEndSilentError(Exception):
    """A worker does not show its front end for now."""


class _Error(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Error


async def front_end_of(client: Client, endpoint: str, engine: str) -> str:
    """Returns the front end of a worker: PYTHON or RUST.

    engine: its name.

    Raises:
        FrontEndSilentError, OSError, aiohttp.ClientError, TimeoutError: it does not answer for now.
    """
    if engine == VLLM:
        status, body = await _asked(client, endpoint, MESSAGES)
        if status in _KEY_NEEDED:
            status, body = await _asked(client, endpoint, ELASTIC)
        return RUST if status == _NOT_IMPLEMENTED and names_rust(body) else PYTHON
    if engine == SGLANG:
        for path in _OF_PYTHON:
            status, _ = await client.get(endpoint, path, TIMEOUT_SECONDS)
            if _is_failure(status):
                raise FrontEndSilentError(f"{path}: status {status}")
            if status != _NOT_FOUND:
                return PYTHON
        return RUST
    return PYTHON


def names_rust(refusal: bytes) -> bool:
    """Returns whether a refusal names vLLM's Rust front end."""
    try:
        return _NAMED in msgspec.json.decode(refusal, type=_Refusal).error.message.lower()
    except UNDECODABLE:
        return False


async def _asked(client: Client, endpoint: str, path: str) -> tuple[int, bytes]:
    status, body = await client.post(endpoint, path, b"{}", TIMEOUT_SECONDS, _MAX_BYTES)
    if _is_failure(status):
        raise FrontEndSilentError(f"{path}: status {status}")
    return status, body


def _is_failure(status: int) -> bool:
    is_refusal = status == _NOT_IMPLEMENTED
    return status == _TOO_MANY_REQUESTS or (status >= _SERVER_ERROR and not is_refusal)
