"""Compares the prompts that the router knows with those that an engine's front end makes."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from extproc.base.engine import Engine, PromptArguments
from extproc.base.errors import RequestError
from extproc.config.schema import Model
from extproc.requests.dialect import model_dialects
from extproc.requests.request import parse
from extproc.tokenizing.tokens import Tokenizer
from tests.clients.recording import Sent
from tests.clients.rendering import RefusedError
from tests.clients.starts import MODEL


class FrontEnd(Protocol):
    """A front end that renders requests."""

    release: str

    async def ids_of(self, path: str, body: dict[str, object]) -> list[int]:
        """Returns a prompt's token ids, or raises RefusedError."""


class Known(NamedTuple):
    """The prompt that the router knows. ids: None where it knows none; reason: why, else ""."""

    ids: list[int] | None
    reason: str = ""


class Router:
    """What the router makes of requests to a worker with an engine, without its process."""

    def __init__(
        self, model: Path, engine: Engine, arguments: PromptArguments | None = None
    ) -> None:
        """arguments: with which an SGLang was started, if it is one."""
        tokenizer = Tokenizer.load(Model(name=MODEL, tokenizer=str(model)))
        assert tokenizer is not None
        self._tokenizer = tokenizer
        told = {} if arguments is None else {"w": arguments}
        self._dialect = model_dialects({"w": engine}, arguments=told).first

    def known(self, sent: Sent) -> Known:
        """Returns the prompt of a request."""
        try:
            read = parse(sent.path, msgspec.json.encode(sent.body), lambda _: self._dialect)
            (prompt,) = read.prompts
            return Known(list(read.truncate(self._tokenizer.encode(prompt))))
        except RequestError as error:
            return Known(None, error.reason)


@dataclass
class Verdict:
    """What came of some requests.

    accepted: those that the front end takes; of them exact ones have its own ids, wrong ones have
    others, and the rest have none, by the reason.
    """

    requests: int = 0
    accepted: int = 0
    exact: int = 0
    wrong: int = 0
    unkeyed: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def add(self, known: Known, ids: list[int]) -> None:
        """Counts a request that the front end takes."""
        self.accepted += 1
        if known.ids is None:
            self.unkeyed[known.reason] += 1
        elif known.ids == ids:
            self.exact += 1
        else:
            self.wrong += 1

    def add_all(self, other: "Verdict") -> None:
        """Counts the requests of another one besides."""
        self.requests += other.requests
        self.accepted += other.accepted
        self.exact += other.exact
        self.wrong += other.wrong
        self.unkeyed += other.unkeyed
        self.refusals += other.refusals


async def judged(sent: Iterable[Sent], front_end: FrontEnd, router: Router) -> Verdict:
    """Compares the prompts of requests with a front end's."""
    verdict = Verdict()
    for one in sent:
        verdict.requests += 1
        try:
            ids = await front_end.ids_of(one.path, one.body)
        except RefusedError as error:
            verdict.refusals[str(error)[:200]] += 1
            continue
        verdict.add(router.known(one), ids)
    return verdict
