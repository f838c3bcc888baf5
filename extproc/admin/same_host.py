"""Refuses what a web page elsewhere could make a browser send (DNS rebinding, cross-site)."""

import ipaddress
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

_OWN_SITES = ("same-origin", "none")


def same_host_only(host: str) -> Middleware:
    """Requests must name loopback or `host`, and come from no page of another origin."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        named = _host_in(request.host)
        if not (_is_loopback(named) or named == host):
            raise web.HTTPForbidden(text=f"Host {named!r} is not served here\n")
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != request.host:
            raise web.HTTPForbidden(text="requests from other origins are refused\n")
        # browsers tell where a request comes from, also where they leave the Origin out; "none" is
        # what somebody typed or chose
        if request.headers.get("Sec-Fetch-Site", "none") not in _OWN_SITES:
            raise web.HTTPForbidden(text="requests from pages of other sites are refused\n")
        return await handler(request)

    return check


def _host_in(authority: str) -> str:
    try:
        return urlsplit(f"//{authority}").hostname or ""
    except ValueError:
        return ""  # as a bracket that is not closed


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
