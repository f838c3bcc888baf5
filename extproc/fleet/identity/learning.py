"""Asks workers for settings that the configuration leaves out: model, adapters, block size.

Sources: `GET /v1/models` of vLLM and SGLang, where an adapter names the model that it belongs to as
its `parent`; `GET /server_info` of SGLang, with `page_size`, and `block_size` among `kv_events`.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

import aiohttp
import msgspec

from extproc.config.schema import Model
from extproc.fleet.asking.polling import MAX_QUESTIONS, Client, Question, fetch_report
from extproc.fleet.records.worker import SelfReport, Worker
from kvstate.feeds.backoff import Backoff
from kvstate.undecodable import UNDECODABLE

MODELS = "/v1/models"
SERVER_INFO = ("/server_info", "/get_server_info")

# Longer lists are cut.
MAX_LISTED = 10_000
MAX_BLOCK_SIZE = 1 << 20


class Card(msgspec.Struct):
    """One entry of GET /v1/models: a model, or an adapter, which names its model as its parent."""

    id: str
    parent: str | None = None
    root: str | None = None


class _ModelCards(msgspec.Struct):
    data: list[Card]


class _Events(msgspec.Struct):
    block_size: int | None = None


class _ServerInfo(msgspec.Struct):
    page_size: int | None = None
    kv_events: _Events | None = None


def from_models(answer: bytes, models: Sequence[Model]) -> SelfReport:
    """Returns what an answer to /v1/models reports; nothing if it cannot be read.

    models: the configured ones; a worker that lists none of them serves no known model.
    """
    cards = cards_in(answer)
    if cards is None:
        return SelfReport()
    bases = [name for card in cards if not card.parent for name in (card.id, card.root)]
    names = {name: model.name for model in models for name in (model.name, *model.aliases)}
    model = next((names[name] for name in bases if name in names), None)
    return SelfReport(model, frozenset(card.id for card in cards if card.parent))


def cards_in(answer: bytes) -> list[Card] | None:
    """Returns the entries of an answer to GET /v1/models, up to `MAX_LISTED`; None if invalid."""
    try:
        return msgspec.json.decode(answer, type=_ModelCards).data[:MAX_LISTED]
    except UNDECODABLE:
        return None


def block_size_in(answer: bytes) -> int | None:
    """Returns the tokens of a block in an answer to /server_info; None if it is missing."""
    try:
        info = msgspec.json.decode(answer, type=_ServerInfo)
    except UNDECODABLE:
        return None
    size = info.kv_events.block_size if info.kv_events else None
    size = size or info.page_size
    return size if size is not None and 0 < size <= MAX_BLOCK_SIZE else None


log = logging.getLogger("kvsteer.workers")

# Adapters are loaded and unloaded while an engine runs.
ASK_AGAIN_SECONDS = 30.0
NOTHING = SelfReport()


class Learning:
    """Asks workers what they serve; keeps the last answer while they do not answer.

    changed: called after an answer changed. chance: returns 0 to 1, for jitter.
    retry_seconds: the first and the longest wait before a silent worker is asked again.
    """

    def __init__(
        self,
        models: Sequence[Model],
        changed: Callable[[], None],
        chance: Callable[[], float],
        retry_seconds: tuple[float, float],
    ) -> None:
        self._retry_seconds = retry_seconds
        self._models = models
        self._changed = changed
        self._chance = chance
        self.question = Question("models", asyncio.Semaphore(MAX_QUESTIONS), ASK_AGAIN_SECONDS)

    def ask_now(self, worker: Worker) -> None:
        """Asks a worker at once, if it is asked at all, since it has moved or become ready."""
        if worker.retries is not None:
            worker.retries.reset()
        poll = worker.polls.get(self.question.name)
        if poll is not None:
            poll.ask_now()

    async def ask(self, client: Client, worker: Worker) -> float:
        """Asks a worker once; returns the seconds until the next question."""
        answers = await self._learn(client, worker)
        if worker.retries is None:
            worker.retries = Backoff(*self._retry_seconds, self._chance)
        if answers and not worker.did_answer:
            worker.retries.reset()
        worker.did_answer = answers
        is_known = worker.self_report.model is not None
        return ASK_AGAIN_SECONDS if is_known else worker.retries.next_seconds()

    async def _learn(self, client: Client, worker: Worker) -> bool:
        """Asks a worker once; returns whether it answers."""
        name = worker.name
        try:
            learned = await self._ask(client, worker.endpoint)
            if learned not in (worker.self_report, NOTHING):
                worker.self_report = learned
                log.info("worker %s reports: %s", name, _summary(learned))
                self._changed()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.debug("worker %s does not say what it serves: %s", name, type(error).__name__)
            return False
        except Exception:  # a bad answer must not end the asking
            log.exception("worker %s: its answer cannot be used", name)
        return True

    async def _ask(self, client: Client, endpoint: str) -> SelfReport:
        answer = await fetch_report(client, endpoint, MODELS)
        learned = NOTHING if isinstance(answer, str) else from_models(answer, self._models)
        for path in SERVER_INFO:
            answer = await fetch_report(client, endpoint, path)
            if not isinstance(answer, str):
                return learned._replace(block_size=block_size_in(answer))
        return learned


def _summary(learned: SelfReport) -> str:
    count = "unknown" if learned.adapters is None else len(learned.adapters)
    adapters = "adapter" if count == 1 else "adapters"
    size = learned.block_size or "unknown"
    return f"model {learned.model or 'unknown'}, {count} {adapters}, block size {size}"
