"""What a probe costs, against the decision that it foresees, and what naming warm models costs.

python benchmarks/probe_cost.py [--quick] [--json FILE]
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import aiohttp
from measure import Cost, Figure, Goal, Row, timed
from rows import Run, arguments, run

from extproc.admin.application import listen
from extproc.admin.asked import HeaderNames
from extproc.admin.probe import ProbeLimits, probe_application
from extproc.base.address import Address
from extproc.config.reader import parse
from extproc.fleet.workers import Workers
from extproc.observing.metrics import Metrics
from extproc.observing.probe_figures import ProbeFigures
from extproc.requests.request import CHAT_PATH, Head, Models, RoutingRequest
from extproc.serving.other_models import OtherModels
from extproc.serving.probing import Probing
from extproc.serving.router import Router
from extproc.tokenizing.tokens import Tokenizer
from kvstate.fleet import FollowedWorkers
from kvtools.simulator.settings import TINY_MODEL
from tests.ports import free_port

METHOD = """\
How: one router in this process, with eight workers of each of two models, which have the same
tokenizer and template. decision: from the request's body to the pick, booked and released. probe:
from the body to the answer of POST /probe without HTTP; over HTTP, with a client in the same
process, whose time is in it. warm models: a decision whose request also says what the other model's
fleet holds. next turn: a conversation whose turns are known but for the last one; new: no turn is
known. Each call has a prompt of its own; rounds take turns. Milliseconds of CPU a call, of all
threads, or of elapsed time if that is less.
"""

HEAD = Head("POST", CHAT_PATH, None)
TOKEN = b"a-token-for-one-benchmark"
NAMES = ("large", "small")
SIZES = {"8k": 8_192, "64k": 65_536}
LETTERS, LETTERS_A_TOKEN = "etaoinshrdlu", 1.8  # of words of these, by the model's tokenizer

DECISION, PROBE, HTTP, WARM = "decision", "probe", "probe over HTTP", "warm models"


class Amount(NamedTuple):
    """How much is measured. rounds: of each kind. calls: in a round."""

    rounds: int
    calls: int


class Asking:
    """The ways to ask one router about a body. prompt_tokens: of the last one decided."""

    def __init__(self, router: Router, probing: Probing, others: OtherModels, url: str) -> None:
        self._router = router
        self._probing = probing
        self._others = others
        self._url = url
        self.prompt_tokens = 0
        self._client = aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN.decode()}"})
        self.ways: Mapping[str, Callable[[bytes], Awaitable[None]]] = {
            DECISION: self.decide,
            PROBE: self.probe,
            HTTP: self.probe_over_http,
            WARM: self.decide_with_models,
        }

    async def decide(self, body: bytes) -> None:
        await self._route(RoutingRequest(HEAD, body))

    async def _route(self, request: RoutingRequest) -> None:
        decision, ticket = await self._router.route(request)
        if ticket is None or not decision.basis.prompt_tokens:
            raise RuntimeError(decision.reason)
        self.prompt_tokens = decision.basis.prompt_tokens
        self._router.release(ticket)

    async def decide_with_models(self, body: bytes) -> None:
        request = RoutingRequest(HEAD, body)
        if len(await self._others.shares(request, {})) != len(NAMES) - 1:
            raise RuntimeError("a model does not know the prompt")
        await self._route(request)

    async def probe(self, body: bytes) -> None:
        (shown,) = await self._probing.answer(HEAD, body, {})
        if not shown["keyed"]:
            raise RuntimeError(shown["reason"])

    async def probe_over_http(self, body: bytes) -> None:
        async with self._client.post(self._url, data=body) as response:
            if response.status != 200:
                raise RuntimeError(await response.text())
            await response.read()

    async def close(self) -> None:
        await self._client.close()


@asynccontextmanager
async def asking() -> AsyncIterator[Asking]:
    """Runs a router and its probe server."""
    models = ", ".join(f"{{name: {name}, tokenizer: '{TINY_MODEL}'}}" for name in NAMES)
    listed = ", ".join(
        f"{{endpoint: '10.0.{at}.{number}:1', model: {name}}}"
        for at, name in enumerate(NAMES)
        for number in range(8)
    )
    config = parse(
        f"models: [{models}]\nworkers: [{listed}]\n"
        "extproc: {deadline_ms: 60000}\nenvoy: {message_timeout_ms: 600000}",
        "benchmark",
    )
    tokenizers = {model.name: Tokenizer.load(model) for model in config.models}
    found = {name: one for name, one in tokenizers.items() if one is not None}
    fleet = FollowedWorkers(12345678, lambda: 0.0)
    workers = Workers(config, fleet, lambda _: [])
    await workers.start()
    router = Router(config, workers, found, Metrics(workers.states), random.Random(0))
    known, place = Models(config.models), Address("127.0.0.1", free_port())
    probing = Probing(router, known, workers.states.load, 8_000.0)
    names = HeaderNames(None, (), (), ())
    application = probe_application(probing, TOKEN, names, ProbeLimits(), ProbeFigures())
    runner = await listen(application, place, "probe", inflates=False)
    others = OtherModels(router, known, NAMES)
    one = Asking(router, probing, others, f"http://{place}/probe")
    try:
        yield one
    finally:
        await one.close()
        await runner.cleanup()
        router.close()
        await workers.close()
        await fleet.close()


def conversation(tokens: int, seed: int) -> list[dict[str, str]]:
    """Returns a chat of about so many tokens."""
    chance, letters = random.Random(seed), 0
    words = ["".join(chance.choices(LETTERS, k=chance.randrange(2, 9))) for _ in range(3_000)]
    turns: list[dict[str, str]] = []
    while letters < LETTERS_A_TOKEN * tokens:
        text = " ".join(chance.choices(words, k=300))
        letters += len(text)
        turns.append({"role": ("user", "assistant")[len(turns) % 2], "content": text})
    return turns


def _body(turns: Sequence[Mapping[str, str]], number: int) -> bytes:
    last = {"role": "user", "content": f"go on with number {number}"}
    return json.dumps({"model": NAMES[0], "messages": [*turns, last]}).encode()


def next_turns(tokens: int) -> Iterator[bytes]:
    """Yields bodies that differ in their last turn alone."""
    turns, number = conversation(tokens, 1), 0
    while True:
        number += 1
        yield _body(turns, number)


def new_conversations(tokens: int) -> Iterator[bytes]:
    """Yields bodies that have no turn in common."""
    seed = 1
    while True:
        seed += 1
        yield _body(conversation(tokens, seed), seed)


KINDS = {"next turn": next_turns, "new": new_conversations}


async def _measured(one: Asking, bodies: Iterator[bytes], amount: Amount) -> dict[str, list[Cost]]:
    """Returns the costs of the rounds of each way, which take turns; the first does not count."""
    costs: dict[str, list[Cost]] = {name: [] for name in one.ways}
    for number in range(amount.rounds + 1):
        names = list(one.ways)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            ask = one.ways[name]
            asked = [next(bodies) for _ in range(amount.calls)]
            with timed() as cost:
                for body in asked:
                    await ask(body)
            if number:
                costs[name].append(cost)
    return costs


def rows(what: str, costs: Mapping[str, Sequence[Cost]], calls: int) -> Sequence[Row]:
    """Returns the milliseconds of each way, relative to the decision's."""
    by_way = {
        name: Figure([1_000 * cost.lesser / calls for cost in each]) for name, each in costs.items()
    }
    goals = {PROBE: Goal(1.1, "<= 1.1")}
    return [
        Row(f"{what}: {name}, ms", by_way[name], by_way[DECISION], goals.get(name))
        for name in by_way
        if name != DECISION
    ]


async def _compare(one: Run) -> None:
    for size, tokens in SIZES.items():
        for kind, bodies in KINDS.items():
            full = Amount(24, 40) if kind == "next turn" else Amount(24, 8)
            amount = one.amount(Amount(1, 1), Amount(3, 4), full)
            async with asking() as asked:
                costs = await _measured(asked, bodies(tokens), amount)
                print(f"{size}, {kind}: {asked.prompt_tokens} prompt tokens", flush=True)
            one.add(rows(f"{size}, {kind}", costs, amount.calls))


def main() -> None:
    """Measures all sizes and kinds."""
    parser = arguments(__doc__, "fewer rounds; within a minute")
    with run(parser, METHOD) as one:
        asyncio.run(_compare(one))


if __name__ == "__main__":
    main()
