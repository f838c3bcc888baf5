"""Engines' front ends as judges: what each makes of a request, without a GPU and weights."""

import asyncio
import contextlib
import json
from asyncio.subprocess import DEVNULL, PIPE, Process
from base64 import b64encode
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path

import aiohttp

from tests.clients.scripted_model import CHAT, Body
from tests.clients.starts import MODEL
from tests.ports import free_port
from tests.waiting import until

START_SECONDS = 60.0

NO_SUCH_API = "the Rust front end has no such API"


class RefusedError(AssertionError):
    """A front end refused a request."""


class PythonFrontEnd:
    """vLLM's Python front end: a process that renders prompts, one at a time.

    release: vLLM's, as it says itself.
    """

    def __init__(self, process: Process, release: str) -> None:
        self.release = release
        self._process = process
        self._turn = asyncio.Lock()

    async def ids_of(self, path: str, body: Body | bytes) -> list[int]:
        """Returns a prompt's token ids. body: bytes are read as vLLM's server reads them.

        Raises:
            RefusedError: vLLM would answer with an error.
        """
        said = {"raw": b64encode(body).decode()} if isinstance(body, bytes) else {"body": body}
        async with self._turn:
            answer = await _asked(self._process, {"path": path, **said})
        if "refused" in answer:
            raise RefusedError(f"{path}: {answer['refused']}")
        ids: list[int] = answer["ids"]
        return ids


@contextlib.asynccontextmanager
async def rendering(python: str, model: Path) -> AsyncIterator[PythonFrontEnd]:
    """Runs vLLM's renderer of a model until the block ends. python: an interpreter with vLLM."""
    script = Path(__file__).with_name("vllm_renderer.py")
    async with _running(python, str(script), str(model)) as process:
        assert process.stdout
        first = await process.stdout.readline()
        assert first, "vLLM's renderer did not start"
        yield PythonFrontEnd(process, json.loads(first)["version"])


class RustFrontEnd:
    """vLLM's Rust front end, which renders without an engine; of agents' APIs it has one.

    release: vLLM's.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, model: Path, release: str) -> None:
        self.release = release
        self._session = session
        self._url = url
        self._model = str(model)

    async def ids_of(self, path: str, body: Body) -> list[int]:
        """Returns a prompt's token ids.

        Raises:
            RefusedError: it would answer with an error, or has no such API.
        """
        if path != CHAT:
            raise RefusedError(f"{path}: {NO_SUCH_API}")
        asked = {**body, "model": self._model}
        async with self._session.post(f"{self._url}{path}/render", json=asked) as answer:
            if answer.status != HTTPStatus.OK:
                raise RefusedError(f"{path}: {(await answer.text())[:500]}")
            ids: list[int] = (await answer.json())["token_ids"]
            return ids


@contextlib.asynccontextmanager
async def rendering_in_rust(binary: Path, model: Path, release: str) -> AsyncIterator[RustFrontEnd]:
    """Runs the Rust front end's renderer of a model until the block ends.

    binary: vllm-rs, as it lies in vLLM's package. release: that package's.

    Raises:
        UnreadyError: it does not take the model.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = ["render", str(model), "--host", "127.0.0.1", "--port", str(port)]
    if (model / "chat_template.jinja").exists():
        words += ["--tool-call-parser", "hermes", "--reasoning-parser", "none"]
    async with (
        _running(str(binary), *words, is_silent=True) as process,
        aiohttp.ClientSession() as session,
    ):
        await _until_ready(process, session, url)
        yield RustFrontEnd(session, url, model, release)


class UnreadyError(RuntimeError):
    """A front end does not start for a model."""


async def _until_ready(process: Process, session: aiohttp.ClientSession, url: str) -> None:
    async def answers() -> bool:
        if process.returncode is not None:
            raise UnreadyError("vllm-rs render ended, so it does not take this model")
        try:
            async with session.get(f"{url}/health") as answer:
                return answer.status == HTTPStatus.OK
        except aiohttp.ClientConnectionError:
            return False

    await until(answers, "vllm-rs render answers", seconds=START_SECONDS)


class SglangFrontEnd:
    """SGLang's own request models and conversions: a process that renders, one at a time.

    release: SGLang's, as it says itself.
    """

    def __init__(self, process: Process, release: str) -> None:
        self.release = release
        self._process = process
        self._turn = asyncio.Lock()

    async def ids_of(self, path: str, body: Body) -> list[int]:
        """Returns a prompt's token ids.

        Raises:
            RefusedError: SGLang would answer with an error.
        """
        async with self._turn:
            answer = await _asked(self._process, {"path": path, "body": body})
        if "refused" in answer:
            raise RefusedError(f"{path}: {answer['refused']}")
        ids: list[int] = answer["ids"]
        return ids


@contextlib.asynccontextmanager
async def rendering_in_sglang(
    python: str, model: Path, reasoning_parser: str
) -> AsyncIterator[SglangFrontEnd]:
    """Runs SGLang's front end of a model until the block ends. python: one with SGLang."""
    script = Path(__file__).with_name("sglang_renderer.py")
    options = json.dumps({"reasoning_parser": reasoning_parser, "served_model_name": MODEL})
    async with _running(python, str(script), str(model), options) as process:
        assert process.stdout
        first = await process.stdout.readline()
        assert first, "SGLang's front end did not start"
        yield SglangFrontEnd(process, json.loads(first)["version"])


async def _asked(process: Process, asked: Body) -> Body:
    """Writes a line to a process and returns the line that it answers."""
    assert process.stdin
    assert process.stdout
    process.stdin.write(json.dumps(asked).encode() + b"\n")
    await process.stdin.drain()
    answer: Body = json.loads(await process.stdout.readline())
    return answer


@contextlib.asynccontextmanager
async def _running(*command: str, is_silent: bool = False) -> AsyncIterator[Process]:
    """Runs a program until the block ends, with pipes, or with nothing that it says."""
    out, log = (DEVNULL, DEVNULL) if is_silent else (PIPE, None)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=out, stderr=log, limit=1 << 24
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
