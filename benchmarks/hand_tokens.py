"""Time to the first token of cached chats: token ids handed over, against the engine alone.

    KVSTEER_VLLM_PYTHON=... python benchmarks/hand_tokens.py [--quick] [--json FILE]
    KVSTEER_SGLANG_SERVER=... python benchmarks/hand_tokens.py --engine sglang [--quick]

Needs vLLM 0.27 or newer, or SGLang 0.5.23, in an environment of its own, on any CPU
(tests/engines/test_vllm.py and test_handing_sglang.py say how), with a tiny model of random
weights: its own time is small, so that what is left is mostly the engine's front end, which a large
model on a GPU has as well. The saving in milliseconds carries over; the ratio does not where a
forward pass is long.
"""

import asyncio
import contextlib
import dataclasses
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import yaml
from extproc_parts import Process, free_address
from measure import Figure, Goal, Row
from rows import arguments, run

from extproc.config.reader import load
from extproc.envoy.envoy_config import render
from kvtools.simulator.settings import TINY_MODEL
from tests.engines import sglang_engine, vllm_engine
from tests.engines.sglang_engine import SglangEngine
from tests.engines.vllm_engine import Engine, Model
from tests.system.envoy_process import running_envoy
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[1]

METHOD = """\
One engine on a CPU, one Envoy in front of it for each way: without ext_proc (the reference), with a
router that hands nothing over, and with one that hands token ids over. Chats of a system turn and
many turns are computed once; then each way asks in turn, each time with another last turn of a few
words, for one token, streamed; so all but the last blocks are cached. TTFT: from sending the
request to the first byte of the answer. Front end: CPU of the engine's API process. Requests a
second: so many clients, each asking again at once."""

CONTEXT_TOKENS = 131_072
BLOCKS = 6_000
SIZES = {"8k": 8_200, "32k": 34_000, "64k": 68_000}  # by five letters a token
GOALS = {"8k": 0.9, "32k": 0.55, "64k": 0.4}
CLIENTS = 4
EVERY = 64
WORDS = ["the", "of", "and", "for", "with", "from", "function", "return", "class", "import"]
WORDS += [
    "value",
    "token",
    "cache",
    "block",
    "worker",
    "request",
    "error",
    "file",
    "path",
    "line",
    "async",
]

ALONE, KEPT, HANDED = "alone", "kept", "handed"
PATH = "/v1/chat/completions"


class Kind(NamedTuple):
    """A kind of engine. missing: says why none can be started. python: its interpreter.

    make: returns one that is to run in a directory, with a model.
    """

    missing: Callable[[], str]
    python: str
    make: Callable[[Path, Path], Engine]


def vllm(directory: Path, model: Path) -> Engine:
    """Returns a vLLM that is not started."""
    served = Model(model, CONTEXT_TOKENS, environment={"VLLM_CPU_KVCACHE_SPACE": "2"})
    return Engine(directory, BLOCKS, 10_000, model=served)


def sglang(directory: Path, model: Path) -> Engine:
    """Returns an SGLang that is not started."""
    tiny = sglang_engine.TINY
    served = dataclasses.replace(tiny, directory=model, context_tokens=CONTEXT_TOKENS)
    return SglangEngine(directory, BLOCKS, model=served)


KINDS = {
    "vllm": Kind(vllm_engine.missing, vllm_engine.PYTHON, vllm),
    "sglang": Kind(sglang_engine.missing, sglang_engine.PYTHON, sglang),
}


class Answer(NamedTuple):
    """One answer. seconds: to its first byte. cpu: of the engine's front end, in seconds."""

    seconds: float
    cpu: float
    prompt_tokens: int
    cached_tokens: int


class Ways:
    """The ways to one engine. urls: by way. metrics: the URL of the router that hands ids over."""

    def __init__(
        self, session: aiohttp.ClientSession, urls: Mapping[str, str], metrics: str, pid: int
    ) -> None:
        self._session = session
        self._urls = urls
        self._metrics = metrics
        self._engine = Process(pid)

    async def ask(self, way: str, turns: Sequence[Mapping[str, str]]) -> Answer:
        """Asks for one token, streamed."""
        body = {
            "model": "tiny",
            "messages": turns,
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
        cpu, began = self._engine.cpu_seconds(), time.perf_counter()
        async with self._session.post(self._urls[way] + PATH, data=data, headers=headers) as one:
            first = await one.content.readany()
            seconds = time.perf_counter() - began
            text = (first + await one.content.read()).decode()
            assert one.status == 200, text
        cpu = self._engine.cpu_seconds() - cpu
        events = [line for line in text.split("data: ") if '"prompt_tokens"' in line]
        usage = json.loads(events[-1])["usage"]
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return Answer(seconds, cpu, usage["prompt_tokens"], cached)

    async def handed(self) -> int:
        """Returns how many requests had their ids with them so far."""
        async with self._session.get(f"{self._metrics}/metrics") as response:
            lines = (await response.text()).splitlines()
        counts = [line for line in lines if "handovers_total" in line and '"handed"' in line]
        return int(float(counts[0].rpartition(" ")[2])) if counts else 0


def conversation(tokens: int, seed: int) -> list[dict[str, str]]:
    """Returns a chat of about so many tokens."""
    chance = random.Random(seed)

    def text(words: int) -> str:
        return " ".join(chance.choice(WORDS) for _ in range(words))

    turns = [{"role": "system", "content": text(2_000)}]
    while sum(len(turn["content"]) for turn in turns) < 5 * tokens:
        turns += [{"role": "user", "content": text(400)}]
        turns += [{"role": "assistant", "content": text(400)}]
    return turns


def with_next(turns: Sequence[Mapping[str, str]], number: int) -> list[Mapping[str, str]]:
    """Returns a chat with a last turn that no other one has."""
    return [*turns, {"role": "user", "content": f"go on with number {number}"}]


def long_model(directory: Path) -> Path:
    """Returns a copy of the tiny model that takes long prompts."""
    model = directory / "model"
    shutil.copytree(TINY_MODEL, model)
    for name, key in (
        ("config.json", "max_position_embeddings"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        said = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**said, key: CONTEXT_TOKENS}))
    return model


def configuration(engine: Engine, model: Path, *, hands: bool) -> dict[str, Any]:
    """Returns a router's configuration."""
    ports = engine.ports
    events = {
        "zmq": f"tcp://127.0.0.1:{ports.events}",
        "replay": f"tcp://127.0.0.1:{ports.replay}",
    }
    return {
        "extproc": {"listen": free_address(), "deadline_ms": 10_000},
        "envoy": {
            "listen": free_address(),
            "admin": free_address(),
            "message_timeout_ms": 20_000,
        },
        "admin": {"listen": free_address()},
        "metrics": {"listen": free_address()},
        "accounting": {"responses": "usage"},
        "policy": {"hand_tokens": {"enabled": hands, "sample_every": EVERY}},
        "models": [{"name": "tiny", "tokenizer": str(model)}],
        "workers": [{"endpoint": ports.endpoint, "events": events}],
    }


def without_router(printed: str) -> str:
    """Returns Envoy's configuration without ext_proc."""
    tree = yaml.safe_load(printed)
    for listener in tree["static_resources"]["listeners"]:
        for chain in listener["filter_chains"]:
            manager = chain["filters"][0]["typed_config"]
            kept = [one for one in manager["http_filters"] if "ext_proc" not in one["name"]]
            manager["http_filters"] = kept
    return str(yaml.safe_dump(tree, sort_keys=False))


@contextlib.asynccontextmanager
async def way(
    directory: Path, name: str, sections: dict[str, Any], *, has_router: bool = True
) -> AsyncIterator[str]:
    """An Envoy, with its router if there is one; yields its URL."""
    file = directory / f"{name}.yaml"
    file.write_text(yaml.safe_dump(sections))
    config = load(str(file))
    printed = render(config) if has_router else without_router(render(config))
    admin_port = int(config.envoy.admin.rpartition(":")[2])
    async with running_envoy(printed, admin_port):
        if not has_router:
            yield f"http://{config.envoy.listen}"
            return
        command = ["-m", "extproc", "serve", "--config", str(file)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, cwd=ROOT, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL
        )
        try:
            yield f"http://{config.envoy.listen}"
        finally:
            process.terminate()
            await process.wait()


@contextlib.asynccontextmanager
async def ways(directory: Path, kind: Kind) -> AsyncIterator[Ways]:
    """An engine and the ways to it, once its tokens are proved."""
    model = long_model(directory)
    engine = kind.make(directory, model)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(engine.kill)
        await engine.start()
        urls, sections = {}, {}
        for name in (ALONE, KEPT, HANDED):
            sections[name] = configuration(engine, model, hands=name == HANDED)
            made = way(directory, name, sections[name], has_router=name != ALONE)
            urls[name] = await stack.enter_async_context(made)
        timeout = aiohttp.ClientTimeout(total=600)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        for name in (KEPT, HANDED):
            admin = f"http://{sections[name]['admin']['listen']}"
            await until(partial(_is_proved, session, admin), "proved", seconds=120)
        metrics = f"http://{sections[HANDED]['metrics']['listen']}"
        yield Ways(session, urls, metrics, engine.pid)


async def _is_proved(session: aiohttp.ClientSession, admin: str) -> bool:
    try:
        async with session.get(f"{admin}/workers") as response:
            (worker,) = await response.json()
    except (aiohttp.ClientError, ValueError):
        return False
    live = [feed["state"] for feed in worker["feeds"]] == ["live"]
    return bool(live and worker["tokens"]["state"] == "proved")


async def measured(one: Ways, label: str, rounds: int) -> list[Row]:
    """Returns the rows of chats of one length."""
    turns = conversation(SIZES[label], len(label))
    found: dict[str, list[Answer]] = {ALONE: [], KEPT: [], HANDED: []}
    numbers = iter(range(1_000_000))
    for name in (ALONE, KEPT, HANDED, HANDED):  # computes it, and lets samples agree
        await one.ask(name, with_next(turns, next(numbers)))
    before, names = await one.handed(), list(found)
    for number in range(rounds):
        for name in names[number % 3 :] + names[: number % 3]:
            found[name].append(await one.ask(name, with_next(turns, next(numbers))))
    handed = await one.handed() - before
    cached = {name: {one.cached_tokens for one in answers} for name, answers in found.items()}
    tokens = found[HANDED][-1].prompt_tokens
    print(f"{label}: {tokens} tokens, ids with {handed} of {rounds}; cached {cached}", flush=True)
    goal = Goal(GOALS[label], f"<= {GOALS[label]}")
    return [
        _row(f"TTFT of {label}, ids handed over (ms)", found, HANDED, "seconds", goal),
        _row(f"TTFT of {label}, router alone (ms)", found, KEPT, "seconds", None),
        _row(f"CPU of the front end, {label}, ids handed over (ms)", found, HANDED, "cpu", None),
    ]


def _row(
    what: str,
    found: Mapping[str, Sequence[Answer]],
    ours: str,
    field: str,
    goal: Goal | None,
) -> Row:
    def figure(name: str) -> Figure:
        values = [1000 * getattr(answer, field) for answer in found[name]]
        return Figure([statistics.median(values)])

    return Row(what, figure(ours), figure(ALONE), goal)


async def load_row(one: Ways, label: str, seconds: float) -> Row:
    """Returns the requests a second that one engine answers."""
    turns, numbers = conversation(SIZES[label], len(label)), iter(range(1_000_000, 2_000_000))

    async def rate(name: str) -> float:
        ends, answered = time.perf_counter() + seconds, 0

        async def client() -> None:
            nonlocal answered
            while time.perf_counter() < ends:
                await one.ask(name, with_next(turns, next(numbers)))
                answered += 1

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return answered / (time.perf_counter() - began)

    ours, alone = await rate(HANDED), await rate(ALONE)
    what = f"requests/s of {label}, {CLIENTS} clients, ids handed over"
    return Row(what, Figure([ours]), Figure([alone]))


async def measure_all(kind: Kind, rounds: int, seconds: float) -> list[Row]:
    """Returns all rows."""
    with tempfile.TemporaryDirectory(prefix="kvsteer-bench-") as name:
        async with ways(Path(name), kind) as one:
            rows = [row for label in SIZES for row in await measured(one, label, rounds)]
            return [*rows, await load_row(one, "32k", seconds)]


def main() -> None:
    """Measures all and prints the table."""
    parser = arguments(__doc__, "fewer rounds")
    parser.add_argument("--engine", choices=list(KINDS), default="vllm", help="default: vllm")
    with run(parser, METHOD) as one:
        kind = KINDS[one.options.engine]
        missing = kind.missing()
        if missing:
            one.add([Row("TTFT of cached chats, ids handed over", missing, missing)])
            return
        print(f"engine: {kind.python}")
        one.add(asyncio.run(measure_all(kind, one.amount(1, 5, 21), one.amount(1.0, 5.0, 20.0))))


if __name__ == "__main__":
    main()
