"""What aiohttp tells of an HTTP server, as our log has it."""

import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

log = logging.getLogger("kvsteer.admin")

# What a client did wrong, before or while a handler read it.
_THEIRS = (HttpProcessingError, web.RequestPayloadError)


class ServerLog:
    """The part of `logging.Logger` that aiohttp uses for a server.

    What is no HTTP is told in one line, the 1st, 2nd, 4th ... time, or any client could fill the
    log; without the error's text, which holds what the client sent. An error of a handler of ours
    is told with its traceback.

    name: of the server.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._malformed = 0

    def debug(self, message: str, *args: object, exc_info: object = None) -> None:
        """aiohttp: nothing to worry about; a request that is not even HTTP is told so, too."""
        if isinstance(exc_info, _THEIRS):
            self.exception(message, *args, exc_info=exc_info)

    def exception(self, message: str, *args: object, exc_info: BaseException | None = None) -> None:
        """aiohttp: a request failed."""
        if not isinstance(exc_info, _THEIRS):
            log.error("%s: %s", self._name, message % args, exc_info=exc_info or True)
            return
        self._malformed += 1
        if self._malformed & (self._malformed - 1) == 0:
            log.warning(
                "%s: a client sent what is no HTTP request: %s (%d so far)",
                self._name,
                type(exc_info).__name__,
                self._malformed,
            )
