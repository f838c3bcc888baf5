"""A worker that answers 503 to every request.

python refusing_worker.py IP:PORT
"""

import sys

from aiohttp import web


async def refuse(_: web.Request) -> web.Response:
    return web.Response(status=503, text="overloaded", headers={"x-worker": sys.argv[1]})


def main() -> None:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", refuse)
    host, _, port = sys.argv[1].rpartition(":")
    web.run_app(application, host=host, port=int(port), print=None)


if __name__ == "__main__":
    main()
