"""What llm-d's picker asks for tokens: a vLLM's render endpoint, as `vllm launch render` serves it.

python benchmarks/peers_render.py IP:PORT

It renders and tokenizes each chat whole, with `tokenizers`, as vLLM does, in a thread beside its
event loop; the tokens are those of our simulated workers.
"""

import asyncio
import sys

import measure  # noqa: F401 - before the packages that it needs
from aiohttp import web
from extproc_parts import MAX_BODY_BYTES, TINY_MODEL

from simulator.requests import Tokenize, of_tokenize
from simulator.responses import decoded, json_response
from simulator.tokens import ModelTokens


async def _serve(listen: str) -> None:
    tokens = ModelTokens(TINY_MODEL)

    async def render(request: web.Request) -> web.Response:
        ids = await of_tokenize(tokens, await decoded(request, Tokenize))
        return json_response({"token_ids": ids})

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    application = web.Application(client_max_size=MAX_BODY_BYTES)
    application.add_routes(
        [web.post("/v1/chat/completions/render", render), web.get("/health", health)]
    )
    runner = web.AppRunner(application)
    await runner.setup()
    host, _, port = listen.rpartition(":")
    await web.TCPSite(runner, host, int(port)).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
