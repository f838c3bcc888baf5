"""The live page: static files of this package, under a policy that lets nothing else run."""

from importlib.metadata import version
from importlib.resources import files

from aiohttp import web

from extproc.workers.workers import Workers
from kvstate.core_choice import default_core_name

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

# Only our own files and our own answers; no inline script or style, no frame, no form elsewhere.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
INDEX = "index.html"
_PATHS = (
    *("/workers", "/explain", "/events", "/decisions", "/prefixes", "/history"),
    *("/discovery", "/draining"),
)


def page_routes(workers: Workers) -> list[web.RouteDef]:
    """GET /, which is the page for browsers and JSON for others, and GET /page/FILE."""
    found = _page_files()

    async def get_root(request: web.Request) -> web.Response:
        if "text/html" in request.headers.get("Accept", ""):
            return _page(INDEX, found[INDEX])
        answer = {
            "version": version("kvsteer"),
            "index_core": default_core_name(),
            "index_bytes": workers.index_bytes(),
            "paths": _PATHS,
        }
        return web.json_response(answer, headers={"Vary": "Accept"})

    async def get_file(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in found:
            raise web.HTTPNotFound
        return _page(name, found[name])

    return [web.get("/", get_root), web.get("/page/{name}", get_file)]


def _page_files() -> dict[str, bytes]:
    folder = files("extproc.admin") / "page"
    return {
        one.name: one.read_bytes()
        for one in folder.iterdir()
        if one.name.rpartition(".")[2] in _KINDS
    }


def _page(name: str, content: bytes) -> web.Response:
    return web.Response(
        body=content,
        content_type=_KINDS[name.rpartition(".")[2]],
        charset="utf-8",
        headers={**_HEADERS, "Vary": "Accept"},
    )
