"""Every error that the admin server answers, as JSON."""

import json
from http import HTTPStatus

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

_JSON = "application/json"


def errors_as_json() -> Middleware:
    """Errors become `{"error": ...}`; those that are JSON already stay as they are."""

    @web.middleware
    async def tell(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPError as error:
            if error.content_type != _JSON:
                error.text, error.content_type = json.dumps({"error": _reason(error)}), _JSON
            raise

    return tell


def _reason(error: web.HTTPError) -> str:
    match error:
        case web.HTTPNotFound():
            return "there is no such path"
        case web.HTTPMethodNotAllowed():
            methods = ", ".join(sorted(error.allowed_methods))
            return f"{error.method} is not for this path: {methods}"
    said = (error.text or "").strip()
    return said or HTTPStatus(error.status).phrase
