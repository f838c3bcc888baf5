"""Traces the paths of a request and of an event through the modules.

`KVSTEER_REQUEST_PATH=plain python -m tests.ways` writes them into docs/architecture.md, and the
tree of modules beside them.
"""

import asyncio
import itertools
import json
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, Self
from unittest.mock import patch

import aiohttp
import grpc

from extproc.app import running
from extproc.checking import self_check
from extproc.config.reader import parse
from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from extproc.serving import lean_server
from extproc.tokenizing import prompt_tokens
from simulator.server import running as running_worker
from simulator.settings import TINY_MODEL, Settings
from tests.extproc.messages import body, head
from tests.house import MEASURED, MODULES, ROOT, name_of, tree
from tests.ports import free_port

PAGE = ROOT / "docs" / "architecture.md"
MARK = "<!-- drawn -->"
PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"

# Other timers and sockets run between two steps: a way has the steps that all of these runs took.
RUNS = 5


class Step(NamedTuple):
    """A call from one module of ours into another; depth: how many such calls it lies within."""

    depth: int
    module: str
    function: str


class Way:
    """Records the first call of each function that another module made, while it is entered."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._seen: set[CodeType] = set()

    def __enter__(self) -> Self:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or code in self._seen or (module := _module_of(code)) is None:
            return
        if _is_beside(frame):
            return
        callers = _modules_above(frame)
        if callers and callers[-1] == module:
            return
        self._seen.add(code)
        depth = sum(one != other for one, other in itertools.pairwise(callers))
        self.steps.append(Step(depth + bool(callers), module, code.co_qualname))


_MODULES: dict[str, str | None] = {}


def _module_of(code: CodeType) -> str | None:
    """Our module that defines this code; None if it is not ours, or a function without a name."""
    file = code.co_filename
    if file not in _MODULES:
        path = Path(file)
        inside = path.suffix == ".py" and path.is_relative_to(ROOT)
        name = name_of(path) if inside else ""
        _MODULES[file] = name if name in MODULES and name.startswith(MEASURED) else None
    return None if code.co_qualname.endswith(">") else _MODULES[file]


def _is_beside(frame: FrameType) -> bool:
    """Whether this call belongs to a periodic check, and not to a request."""
    above: FrameType | None = frame
    while above is not None:
        if above.f_code.co_name.endswith("keep_looking"):
            return True
        above = above.f_back
    return False


def _modules_above(frame: FrameType) -> list[str]:
    """KVSteer's modules that wait for this call, outermost first."""
    found: list[str] = []
    above = frame.f_back
    while above is not None:
        module = _module_of(above.f_code)
        if module is not None:
            found.append(module)
        above = above.f_back
    return found[::-1]


def _chat(text: str) -> dict[str, Any]:
    message = {"role": "user", "content": " ".join([text] * 10)}
    return {"model": "tiny", "messages": [message], "max_tokens": 1}


async def _routed(channel: grpc.aio.Channel, text: str) -> None:
    """Sends a request as Envoy does: its headers, its body, and the end of the stream."""
    call = channel.stream_stream(
        PROCESS,
        request_serializer=ProcessingRequest.SerializeToString,
        response_deserializer=ProcessingResponse.FromString,
    )()
    await call.write(head())
    await call.read()
    await call.write(body(json.dumps(_chat(text)).encode()))
    await call.read()
    await call.done_writing()
    assert await call.read() == grpc.aio.EOF


class Traced(NamedTuple):
    """steps: those of every run, in the order of the last. ever: the calls of any run."""

    steps: list[Step]
    ever: set[tuple[str, str]]

    @property
    def calls(self) -> set[tuple[str, str]]:
        """Module and function of the steps."""
        return {(step.module, step.function) for step in self.steps}

    @property
    def modules(self) -> set[str]:
        """The modules of the steps."""
        return {step.module for step in self.steps}


async def _traced(act: Callable[[str], Awaitable[None]]) -> Traced:
    runs: list[list[Step]] = []
    for number in range(RUNS):
        with Way() as way:
            await act(f"text {number}")
        runs.append(way.steps)
    calls = [{(step.module, step.function) for step in run} for run in runs]
    common = set.intersection(*calls)
    steps = [step for step in runs[-1] if (step.module, step.function) in common]
    return Traced(steps, set.union(*calls))


def _untraced(look: Callable[[], int]) -> int:
    """Calls a check of this module without recording its steps; returns what it sees."""
    profile = sys.getprofile()
    sys.setprofile(None)
    seen = look()
    sys.setprofile(profile)
    return seen


async def _until(condition: Callable[[], bool]) -> None:
    """Waits for a condition, without a limit."""
    while not _untraced(condition):  # noqa: ASYNC110 - what is awaited has no event
        await asyncio.sleep(0.005)


async def _ways() -> tuple[Traced, Traced]:
    """The way of a request and the way of an event, of a router with one worker."""
    async with running_worker(Settings(model="tiny")) as worker:
        listen, admin, metrics = (f"127.0.0.1:{free_port()}" for _ in range(3))
        feed = f"{{zmq: '{worker.events_endpoint}', replay: '{worker.replay_endpoint}'}}"
        config = parse(
            f"extproc: {{listen: '{listen}'}}\n"
            f"admin: {{listen: '{admin}'}}\nmetrics: {{listen: '{metrics}'}}\n"
            f"models: [{{name: tiny, tokenizer: '{TINY_MODEL}', verify: off}}]\n"
            f"workers: [{{endpoint: '{worker.endpoint}', events: {feed}}}]\n",
            "ways",
        )
        async with running(config) as parts, aiohttp.ClientSession(worker.url) as engine:
            await _until(parts.readiness)

            def blocks() -> int:
                status = parts.workers.status()
                return sum(feed["blocks"] for one in status for feed in one["feeds"])

            async def told(text: str) -> None:
                before = _untraced(blocks)
                async with engine.post("/v1/chat/completions", json=_chat(text)) as answer:
                    assert answer.status == 200
                await _until(lambda: blocks() > before)

            await told("first")
            event = await _traced(told)  # before requests, whose self-check listens
            async with grpc.aio.insecure_channel(listen) as channel:
                await _routed(channel, "first")
                return await _traced(lambda text: _routed(channel, text)), event


def ways() -> dict[str, Traced]:
    """The way of a request and the way of an event, by their titles on the page."""
    # switches off what depends on time: a sample of requests is watched as well, a template that
    # takes long is rendered in a thread, and the end of a stream waits for something to be written
    # with it
    watches = patch.object(self_check, "MAX_PENDING", 0)
    renders = patch.object(prompt_tokens, "INLINE_SECONDS", 60.0)
    with watches, renders, patch.object(lean_server, "END_SECONDS", 0.0):
        request, event = asyncio.run(_ways())
    return {"The way of a request": request, "The way of an event": event}


def shown(way: Traced) -> str:
    """A way as the page shows it: one line per call, indented by the calls around it."""
    head_line = f"{len(way.modules)} modules, {len(way.steps)} calls from one to another:"
    lines = [f"{'  ' * (step.depth - 1)}{step.module}: {step.function}" for step in way.steps]
    return "\n".join([head_line, "", "```text", *lines, "```"])


def calls_on(page: str, title: str) -> set[tuple[str, str]]:
    """Module and function of the calls that the page shows below a title."""
    section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^ *([\w.]+): (\S+)$", section, re.MULTILINE))


def written(page: str, drawn: Mapping[str, str]) -> str:
    """The page with these parts in place of those that it had there."""
    for title, text in drawn.items():
        before, found, rest = page.partition(f"\n## {title}\n")
        introduction, mark, old = rest.partition(MARK)
        assert mark, f"{PAGE.name}: no section {title!r}, or no {MARK} in it"
        _, next_title, after = old.partition("\n## ")
        page = f"{before}{found}{introduction}{mark}\n\n{text}\n{next_title}{after}"
    return page


if __name__ == "__main__":
    drawn = {title: shown(way) for title, way in ways().items()}
    PAGE.write_text(written(PAGE.read_text(), {"The tree": tree(), **drawn}))
