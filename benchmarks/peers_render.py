"""The tokenizer of llm-d's picker: vLLM's render endpoint, as in `vllm launch render`.

python benchmarks/peers_render.py IP:PORT

Like vLLM, it renders and tokenizes each whole chat with `tokenizers`, in a thread beside its event
loop; the tokens are those of the simulated workers.
"""

import sys

import measure  # noqa: F401 - before the packages that it needs
from aiohttp import web
from extproc_parts import MAX_BODY_BYTES, TINY_MODEL

from kvtools.simulator.requests import Tokenize, of_tokenize
from kvtools.simulator.responses import decoded, json_response
from kvtools.simulator.tokens import ModelTokens


def _serve(listen: str) -> None:
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
    host, _, port = listen.rpartition(":")
    web.run_app(application, host=host, port=int(port), print=None)


if __name__ == "__main__":
    _serve(sys.argv[1])
