"""Which spellings of a path a real uvicorn with Starlette serves, as under vLLM and SGLang.

Run it where uvicorn, starlette, httptools and h11 are installed (the tests do not need them):

    python -m tests.extproc.requests.served_paths > tests/extproc/requests/served_paths.json

It prints, for each target of a request, the status with each of uvicorn's two parsers.
"""

import asyncio
import contextlib
import json
import socket
import sys
from importlib import import_module
from typing import Any

PATH = "/v1/chat/completions"

# Targets as they stand in a request line. What an answer of 200 means: the model computes.
TARGETS = (
    PATH,
    f"{PATH}?a=1",
    f"{PATH}?a=%63",
    f"{PATH}%3fa=1",
    f"{PATH}#a",
    f"{PATH}%23a",
    f"{PATH};a=1",
    f"{PATH}/",
    f"{PATH}//",
    f"{PATH}%2f",
    f"{PATH}%2F",
    f"{PATH}%20",
    f"{PATH}%00",
    f"{PATH}%",
    "/v1/chat/%63ompletions",
    "/%76%31/chat/completions",
    "/v1/chat/%43ompletions",
    "/v1%2fchat%2Fcompletions",
    "%2fv1/chat/completions",
    "/v1/chat/%2563ompletions",
    "/v1/chat/comp%6Cetions",
    "/v1/chat/comp%6cetions",
    "/v1/chat/completion%zz",
    "//v1/chat/completions",
    "/v1//chat/completions",
    "/v1/./chat/completions",
    "/v1/x/../chat/completions",
    "/v1/%2e/chat/completions",
    "/v1/x/%2e%2e/chat/completions",
    "/V1/chat/completions",
    "/v1/Chat/Completions",
    "/v1;x=1/chat/completions",
    "/v1\\chat\\completions",
    "/v1%5cchat%5ccompletions",
    "/v1/chat/completions\\",
    f"http://worker:8000{PATH}",
    f"HTTP://worker{PATH}?a",
    "http://worker/v1/chat/%63ompletions",
    f"http://u@worker{PATH}",
    "http://worker",
    f"worker{PATH}",
    "*",
    "/v1/chat/c%C3%B6mpletions",
    "/v1/chat/completions%ff",
    "/v1/chat/%u0063ompletions",
)


async def status_of(port: int, target: str) -> int:
    """The status of the answer to a POST of this target; 0 if there is none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = ("host: worker", "content-length: 2", "connection: close", "", "{}")
    writer.write("\r\n".join((f"POST {target} HTTP/1.1", *lines)).encode())
    answer = await reader.read()
    writer.close()
    parts = answer.split(b" ", 2)
    return int(parts[1]) if len(parts) > 1 else 0


async def statuses(parser: str) -> dict[str, int]:
    """The status of each target with one of uvicorn's parsers."""
    uvicorn: Any = import_module("uvicorn")
    applications: Any = import_module("starlette.applications")
    responses: Any = import_module("starlette.responses")
    routing: Any = import_module("starlette.routing")

    async def answer(_: object) -> object:
        return responses.PlainTextResponse("computed")

    app = applications.Starlette(routes=[routing.Route(PATH, answer, methods=["POST"])])
    with socket.create_server(("127.0.0.1", 0)) as bound:
        settings = uvicorn.Config(app, http=parser, log_level="critical", lifespan="off")
        server = uvicorn.Server(settings)
        serving = asyncio.create_task(server.serve([bound]))
        port = bound.getsockname()[1]
        found = {target: await status_of(port, target) for target in TARGETS}
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    return found


async def main() -> None:
    """Prints the table."""
    with_httptools, with_h11 = await statuses("httptools"), await statuses("h11")
    table = {
        target: {"httptools": with_httptools[target], "h11": with_h11[target]} for target in TARGETS
    }
    json.dump(table, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    asyncio.run(main())
