"""Asks workers what they serve, again and again, where the configuration leaves it to them.

What a worker tells of itself: its model, its adapters, the size of its blocks.

Sources: `GET /v1/models` of vLLM and SGLang, where an adapter names the model that it belongs to as
its `parent`; `GET /server_info` of SGLang, with `page_size`, and `block_size` among `kv_events`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import aiohttp
import msgspec

from extproc.config import Model, Worker
from extproc.workers.asking import Asking
from kvstate.feeds.backoff import Backoff

MODELS = "/v1/models"
SERVER_INFO = ("/server_info", "/get_server_info")

# A server that lists more than this is not read further.
MAX_LISTED = 10_000
MAX_BLOCK_SIZE = 1 << 20


class Learned(NamedTuple):
    """What is known of a worker; None is not known.

    model: the configured model that it serves. adapters: those that it lists, by name.
    """

    model: str | None = None
    adapters: frozenset[str] | None = None
    block_size: int | None = None


class Card(msgspec.Struct):
    """One entry of GET /v1/models: a model, or an adapter, which names its model as its parent."""

    id: str
    parent: str | None = None
    root: str | None = None


class _Cards(msgspec.Struct):
    data: list[Card]


class _Events(msgspec.Struct):
    block_size: int | None = None


class _ServerInfo(msgspec.Struct):
    page_size: int | None = None
    kv_events: _Events | None = None


def from_models(answer: bytes, models: Sequence[Model]) -> Learned:
    """What /v1/models tells; nothing if it is no such answer.

    models: those of the configuration; a worker that lists none of them serves none that we know.
    """
    cards = cards_in(answer)
    if cards is None:
        return Learned()
    bases = [name for card in cards if not card.parent for name in (card.id, card.root)]
    names = {name: model.name for model in models for name in (model.name, *model.aliases)}
    model = next((names[name] for name in bases if name in names), None)
    return Learned(model, frozenset(card.id for card in cards if card.parent))


def cards_in(answer: bytes) -> list[Card] | None:
    """Returns what an answer to GET /v1/models lists, up to `MAX_LISTED`; None if it is none."""
    try:
        return msgspec.json.decode(answer, type=_Cards).data[:MAX_LISTED]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def block_size_in(answer: bytes) -> int | None:
    """The tokens of a block, as /server_info tells; None if it does not."""
    try:
        info = msgspec.json.decode(answer, type=_ServerInfo)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    size = info.kv_events.block_size if info.kv_events else None
    size = size or info.page_size
    return size if size is not None and 0 < size <= MAX_BLOCK_SIZE else None


log = logging.getLogger("kvsteer.workers")

# Adapters are loaded and unloaded while an engine runs.
ASK_AGAIN_SECONDS = 30.0
# A worker that does not tell is asked so soon at first, and at last so seldom; with jitter, 30 s.
RETRY_SECONDS = (1.0, 20.0)
NOTHING = Learned()


class Learning:
    """What the workers told, kept while they do not answer.

    changed: is told the name of a worker of which something else is known now. chance: 0 to 1, for
    jitter.
    """

    def __init__(
        self,
        models: Sequence[Model],
        changed: Callable[[str], None],
        chance: Callable[[], float],
    ) -> None:
        self._models = models
        self._changed = changed
        self._chance = chance
        self._learned: dict[str, Learned] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wakes: dict[str, asyncio.Event] = {}
        self._asking: Asking | None = None

    def of(self, name: str) -> Learned:
        """What is known of a worker."""
        return self._learned.get(name, NOTHING)

    async def ask(self, workers: Mapping[str, Worker]) -> None:
        """Asks those of these workers that are to be asked, and no others any more."""
        wanted = {name for name, worker in workers.items() if worker.learn}
        gone = [self._end(name) for name in self._tasks.keys() - wanted]
        await asyncio.gather(*gone, return_exceptions=True)
        for name in self._learned.keys() - wanted:
            del self._learned[name]
        if wanted and self._asking is None:
            self._asking = Asking()
        for name in wanted - self._tasks.keys():
            wake = self._wakes[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._keep_asking(name, wake))

    def ask_now(self, name: str) -> None:
        """A worker is not as it was: it is elsewhere, or ready; if it is asked, then now."""
        if name in self._wakes:
            self._wakes[name].set()

    def forget(self, name: str) -> None:
        """Another engine has a worker's name: what the one before told is not known of it.

        It is asked anew with the next `ask`.
        """
        self._learned.pop(name, None)
        if name in self._tasks:
            self._end(name)

    async def close(self) -> None:
        """Asks nobody any more."""
        await self.ask({})
        if self._asking is not None:
            await self._asking.__aexit__(None, None, None)
            self._asking = None

    def _end(self, name: str) -> asyncio.Task[None]:
        del self._wakes[name]
        task = self._tasks.pop(name)
        task.cancel()
        return task

    async def _keep_asking(self, name: str, wake: asyncio.Event) -> None:
        retries = Backoff(*RETRY_SECONDS, self._chance)
        did_answer = False
        while True:
            answers = await self._learn(name)
            if answers and not did_answer:
                retries.reset()
            did_answer = answers
            is_known = self.of(name).model is not None
            seconds = ASK_AGAIN_SECONDS if is_known else retries.next_seconds()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await wake.wait()
                    retries.reset()
            wake.clear()

    async def _learn(self, name: str) -> bool:
        """Asks a worker once; whether it answers."""
        try:
            learned = await self._ask(name)
            if learned not in (self.of(name), NOTHING):
                self._learned[name] = learned
                log.info("worker %s tells: %s", name, _shown(learned))
                self._changed(name)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.debug("worker %s does not tell what it serves: %s", name, type(error).__name__)
            return False
        except Exception:  # one worker's answer must not end its asking
            log.exception("worker %s: what it tells cannot be taken", name)
        return True

    async def _ask(self, name: str) -> Learned:
        if self._asking is None:
            return NOTHING
        answer = await self._asking.get(name, MODELS)
        learned = NOTHING if isinstance(answer, str) else from_models(answer, self._models)
        for path in SERVER_INFO:
            answer = await self._asking.get(name, path)
            if not isinstance(answer, str):
                return learned._replace(block_size=block_size_in(answer))
        return learned


def _shown(learned: Learned) -> str:
    count = "unknown" if learned.adapters is None else len(learned.adapters)
    adapters = "adapter" if count == 1 else "adapters"
    size = learned.block_size or "unknown"
    return f"model {learned.model or 'unknown'}, {count} {adapters}, block size {size}"
