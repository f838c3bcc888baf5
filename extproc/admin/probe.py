"""POST /probe, on a port of its own: what a request would find here, for gateways that choose.

Who asks must send the token of `probe.token_file` (RFC 6750, section 2.1). The body is the request
as a client would send it, the query names its path and, if wanted, models in the place of the one
in the body; headers count as those of a routed request do, so that a tenant's probe shows its own
cache alone. Whatever is beyond a bound is refused before it costs a decision.
"""

import asyncio
import hmac
import json
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from extproc.admin.application import errors_as_json
from extproc.admin.asked import HeaderNames, asked
from extproc.admin.routes import answered, bad_request
from extproc.base.errors import StartError, UnknownModelError
from extproc.base.secret_file import secret_in
from extproc.config.sections import MAX_WARM_MODELS
from extproc.observing.probe_figures import (
    ANSWERED,
    BUSY,
    REFUSED,
    UNAUTHORIZED,
    ProbeFigures,
)
from extproc.requests.request import CHAT_PATH, MAX_BYTES, NOT_INFERENCE, path_of, why_unkeyed
from extproc.serving.probing import Probing

PATH = "/probe"

# How long a body may take to come: who asks has it already.
READ_SECONDS = 5.0

_SCHEME = b"bearer "

# How a client is told that it may ask again.
_RETRY = {"Retry-After": "1"}


class ProbeLimits(NamedTuple):
    """The bounds of probes. body_bytes: of a body. concurrent: at once. read_seconds: of a body."""

    body_bytes: int = MAX_BYTES
    concurrent: int = 4
    read_seconds: float = READ_SECONDS


def token_in(path: str) -> bytes:
    """Returns the token in a file.

    Raises:
        StartError: the file cannot be read, has too few bytes, or what no header can have.
    """
    token = secret_in("probe.token_file", path)
    if not all(0x21 <= byte <= 0x7E for byte in token):
        raise StartError(f"probe.token_file: {path}: a token is printable ASCII without spaces")
    return token


def probe_application(
    probing: Probing,
    token: bytes,
    names: HeaderNames,
    limits: ProbeLimits,
    figures: ProbeFigures,
    clock: Callable[[], float] = time.monotonic,
) -> web.Application:
    """Returns the probe server. names: the headers that count in what is asked about."""
    free = limits.concurrent

    async def post_probe(request: web.Request) -> web.Response:
        nonlocal free
        if not free:
            figures.end(BUSY, 0.0)
            raise web.HTTPTooManyRequests(text="too many probes at once", headers=_RETRY)
        began = clock()
        free -= 1
        try:
            response = await _answer(request, probing, names, limits)
        except web.HTTPError:
            figures.end(REFUSED, 0.0)
            raise
        finally:
            free += 1
        figures.end(ANSWERED, clock() - began)
        return response

    application = web.Application(
        client_max_size=limits.body_bytes,
        middlewares=[errors_as_json(), only_with(token, figures)],
    )
    application.add_routes([web.post(PATH, post_probe)])
    return application


def only_with(token: bytes, figures: ProbeFigures) -> Middleware:
    """Returns a middleware that answers 401, whatever is asked, to who does not send the token."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        sent = [one.encode(errors="replace") for one in request.headers.getall("Authorization", ())]
        is_bearer = len(sent) == 1 and sent[0][: len(_SCHEME)].lower() == _SCHEME
        if not is_bearer or not hmac.compare_digest(sent[0][len(_SCHEME) :].strip(), token):
            figures.end(UNAUTHORIZED, 0.0)
            raise web.HTTPUnauthorized(
                text="want the token of probe.token_file", headers={"WWW-Authenticate": "Bearer"}
            )
        return await handler(request)

    return check


async def _answer(
    request: web.Request, probing: Probing, names: HeaderNames, limits: ProbeLimits
) -> web.Response:
    """Returns the answer to a probe, whose body is read here."""
    path, models = _asked_path(request), _asked_models(request)
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise web.HTTPUnsupportedMediaType(text="the body must not be compressed")
    body = await _body_of(request, limits)
    head, named = asked(path, [*request.headers.items()], names, len(body))
    try:
        return answered({"models": await probing.answer(head, body, named, models)})
    except UnknownModelError as error:
        raise web.HTTPNotFound(
            text=json.dumps({"error": str(error)}), content_type="application/json"
        ) from None


def _asked_path(request: web.Request) -> str:
    """Returns the path of what is asked about: an API's by which models compute."""
    path = path_of(request.query.get("path", CHAT_PATH))
    if why_unkeyed("POST", path) == NOT_INFERENCE:
        raise bad_request("path: by this one no model is called")
    return path


def _asked_models(request: web.Request) -> Sequence[str]:
    models = list(dict.fromkeys(request.query.getall("model", ())))
    if len(models) > MAX_WARM_MODELS:
        raise bad_request(f"model: more than {MAX_WARM_MODELS}")
    return models


async def _body_of(request: web.Request, limits: ProbeLimits) -> bytes:
    """Returns the body, which must be short enough, and come within the time limit."""
    length = request.content_length or 0
    if length > limits.body_bytes:
        raise web.HTTPRequestEntityTooLarge(limits.body_bytes, length)
    try:
        async with asyncio.timeout(limits.read_seconds):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text="the body did not come in time") from None
