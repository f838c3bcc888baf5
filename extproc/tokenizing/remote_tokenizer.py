"""Gets token ids from workers: POST /tokenize, with a deadline, and a retry at another one."""

import asyncio
import hashlib
import logging
import random
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp

from extproc.base.errors import RequestError
from extproc.config import schema
from extproc.requests.prompt import Prompt, Text, TokenIds
from extproc.tokenizing.remote_tokenizer_wire import PATH, answered, longest_answer_bytes, question
from kvstate.feeds.backoff import Backoff
from kvstate.overlap import Tokens

log = logging.getLogger("kvsteer.tokens")

# A worker that fails this often in a row is not asked until a probe succeeds.
MAX_FAILURES = 3

# Pauses before probes: the first, and the longest.
PROBE_SECONDS = (1.0, 30.0)


@dataclass(eq=False, slots=True)
class Failures:
    """The consecutive failures of one worker's tokenizer; part of the worker's record.

    Times are seconds of one monotonic clock. probe_seconds: the pauses before probes.
    """

    count: int = 0
    probe_at: float = 0.0
    is_probed: bool = False
    backoff: Backoff | None = None
    probe_seconds: tuple[float, float] = PROBE_SECONDS

    @property
    def is_open(self) -> bool:
        """Whether the worker is not asked now."""
        return self.count >= MAX_FAILURES

    def forget(self) -> None:
        """Forgets the failures: the worker answered."""
        self.count, self.is_probed, self.backoff = 0, False, None

    def add(self, now: float, chance: Callable[[], float]) -> None:
        """Counts a failure: no answer, or an invalid one."""
        self.backoff = self.backoff or Backoff(*self.probe_seconds, chance)
        self.count += 1
        self.is_probed = False
        if self.is_open:
            self.probe_at = now + self.backoff.next_seconds()


# The workers that may be asked now, by ip:port, and how often each failed.
Endpoints = Mapping[str, Failures]


def choose(workers: Endpoints, chance: Callable[[], float]) -> str | None:
    """Returns a random worker of those that failed least; None if none may be asked.

    chance: a random number from 0 to 1.
    """
    least = min([one.count for one in workers.values()], default=MAX_FAILURES)
    if least >= MAX_FAILURES:
        return None
    best = [worker for worker, one in workers.items() if one.count == least]
    return best[int(chance() * len(best)) % len(best)]


def count_avoided(workers: Endpoints) -> int:
    """Returns how many workers are not asked because they keep failing."""
    return sum([one.is_open for one in workers.values()])


def to_probe(workers: Endpoints, now: float) -> str | None:
    """Returns a worker due for a probe and marks it as being probed; None if none is due."""
    for worker, one in workers.items():
        if one.is_open and not one.is_probed and now >= one.probe_at:
            one.is_probed = True
            return worker
    return None


# Memory of an entry besides its ids (measured): the entry, its key, an array.
_ENTRY_BYTES = 260


def key_of(question: bytes) -> bytes:
    """Returns the key of a question: 128 bits of a cryptographic hash, since clients choose it."""
    return hashlib.blake2b(question, digest_size=16).digest()


class TokenCache:
    """Token ids by question, bounded in bytes: the least recently used are dropped first.

    limit_bytes: for all entries; 0 keeps none.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[bytes, Tokens] = OrderedDict()
        self.bytes = 0

    def find(self, key: bytes) -> Tokens | None:
        """Returns the ids, which must not be changed; None if they are not known."""
        tokens = self._entries.get(key)
        if tokens is not None:
            self._entries.move_to_end(key)
        return tokens

    def keep(self, key: bytes, tokens: Tokens) -> None:
        """Keeps an answer, and drops the least recently used ones beyond the limit."""
        size = _size(tokens)
        if size > self._limit_bytes or key in self._entries:
            return
        self._entries[key] = tokens
        self.bytes += size
        while self.bytes > self._limit_bytes:
            _, lost = self._entries.popitem(last=False)
            self.bytes -= _size(lost)


def _size(tokens: Tokens) -> int:
    return _ENTRY_BYTES + len(tokens) * tokens.itemsize


# A question that fails at once is retried at another worker.
MAX_TRIES = 2

# Most open questions; further requests are routed without tokens.
MAX_FLIGHTS = 1_024

# A late answer to a longer question does not count as a failure: a client must not be able to
# disable a worker's tokenizer.
FAIR_QUESTION_BYTES = 64 * 1024

# Longer answers are parsed in a thread (this size takes a millisecond).
INLINE_ANSWER_BYTES = 64 * 1024

# The text of a probe.
PROBE = Text("probe")

_OK = 200
_READ_BYTES = 64 * 1024

# Statuses of a healthy worker that refuses a prompt: it would refuse the request too, or does not
# support this form of question (SGLang accepts no conversations).
_REFUSALS = (400, 413, 422)

_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


class _FailedError(Exception):
    """The worker gave no valid answer."""


class RemoteTokenizer:
    """Asks the workers of one model for the token ids of prompts.

    endpoints: returns the workers that may be asked now. count: called with the outcome of every
    question; docs/metrics.md lists the outcomes. Belongs to the event loop in which it was created.
    plain_turns: None, since only a worker knows the ids of a turn.
    """

    plain_turns = None

    def __init__(
        self,
        model: schema.Model,
        options: schema.RemoteTokenizerSettings,
        endpoints: Callable[[], Endpoints],
        count: Callable[[str], object] = lambda _: None,
        max_flights: int = MAX_FLIGHTS,
    ) -> None:
        self._max_flights = max_flights
        self._options = options
        self._endpoints = endpoints
        self._count = count
        self._cache = TokenCache(options.cache_bytes)
        self.flights: dict[bytes, asyncio.Task[Tokens]] = {}
        self._probes: set[asyncio.Task[None]] = set()
        self._probe = question(PROBE, model.name)
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=options.connections)
        timeout = aiohttp.ClientTimeout(total=None)  # this class has its own deadline
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, headers=_HEADERS
        )

    async def close(self) -> None:
        """Cancels open questions and closes the connections."""
        tasks = [*self.flights.values(), *self._probes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()

    async def encode(self, prompt: Prompt, model: str | None) -> Tokens:
        """Returns the token ids of a prompt, which must not be changed.

        model: as the client wrote it.

        Raises:
            RequestError: no worker answered in time, one refused, or the answer would be uncertain.
        """
        if isinstance(prompt, array):
            return prompt
        if isinstance(prompt, TokenIds):
            return prompt.ids
        asked = question(prompt, model)
        key = key_of(asked)
        known = self._cache.find(key)
        if known is not None:
            self._count("cached")
            return known
        flight = self.flights.get(key)
        if flight is None:
            flight = self._start(key, asked)
        else:
            self._count("joined")
        return await asyncio.shield(flight)  # other requests may wait for it too

    def _start(self, key: bytes, asked: bytes) -> asyncio.Task[Tokens]:
        if len(self.flights) >= self._max_flights:
            self._count("tokenizer_unavailable")
            raise RequestError("tokenizer_unavailable")
        flight = asyncio.create_task(self._fly(key, asked))
        self.flights[key] = flight
        flight.add_done_callback(lambda done: self._landed(key, done))
        return flight

    def _landed(self, key: bytes, flight: asyncio.Task[Tokens]) -> None:
        del self.flights[key]
        if not flight.cancelled():
            flight.exception()  # marks it as retrieved: all waiting requests may be gone

    async def _fly(self, key: bytes, asked: bytes) -> Tokens:
        try:
            tokens = await self._tell(asked)
        except RequestError as error:
            self._count(error.reason)
            raise
        self._count("answered")
        self._cache.keep(key, tokens)
        return tokens

    async def _tell(self, asked: bytes) -> Tokens:
        """Asks one worker, and another if that fails at once."""
        ends = asyncio.get_running_loop().time() + self._options.deadline_ms / 1000
        workers = dict(self._endpoints())
        self._probe_one(workers)
        reason = "tokenizer_unavailable"
        for _ in range(MAX_TRIES):
            worker = choose(workers, random.random)
            if worker is None:
                break
            failures = workers.pop(worker)
            try:
                async with asyncio.timeout_at(ends):
                    return await self._ask(worker, asked, failures)
            except TimeoutError:
                if len(asked) <= FAIR_QUESTION_BYTES:
                    failures.add(time.monotonic(), random.random)
                raise RequestError("tokenizer_timeout") from None
            except _FailedError:
                failures.add(time.monotonic(), random.random)
                reason = "tokenizer_failed"
        raise RequestError(reason)

    def _probe_one(self, workers: Endpoints) -> None:
        worker = to_probe(workers, time.monotonic())
        if worker is not None:
            probe = asyncio.create_task(self._run_probe(worker, workers[worker]))
            self._probes.add(probe)
            probe.add_done_callback(self._ended)

    def _ended(self, probe: asyncio.Task[None]) -> None:
        self._probes.discard(probe)
        error = None if probe.cancelled() else probe.exception()
        if error is not None:
            log.error("a worker's tokenizer could not be probed: %s", type(error).__name__)

    async def _run_probe(self, worker: str, failures: Failures) -> None:
        """Probes a worker; no request waits for it, so the worker may still hang."""
        try:
            async with asyncio.timeout(self._options.deadline_ms / 1000):
                await self._ask(worker, self._probe, failures)
        except (TimeoutError, RequestError, _FailedError):
            failures.add(time.monotonic(), random.random)
        except Exception:  # `_ended` logs it; the worker must be probed again, later
            failures.add(time.monotonic(), random.random)
            raise
        finally:
            failures.is_probed = False

    async def _ask(self, worker: str, asked: bytes, failures: Failures) -> Tokens:
        """Returns one worker's answer.

        Raises:
            RequestError: it refuses this prompt. _FailedError: it gave no valid answer.
        """
        try:
            content = await self._post(worker, asked)
            if len(content) > INLINE_ANSWER_BYTES:
                tokens = await asyncio.to_thread(_read, content)
            else:
                tokens = _read(content)
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise _FailedError from None
        failures.forget()
        return tokens

    async def _post(self, worker: str, asked: bytes) -> bytes:
        limit = longest_answer_bytes(asked)
        async with self._session.post(
            f"http://{worker}{PATH}", data=asked, allow_redirects=False
        ) as response:
            if response.status in _REFUSALS:
                raise RequestError("tokenizer_refused")
            if response.status != _OK:
                raise _FailedError
            content = bytearray()
            async for piece in response.content.iter_chunked(_READ_BYTES):
                content += piece
                if len(content) > limit:
                    raise _FailedError
        return bytes(content)


def _read(content: bytes) -> Tokens:
    try:
        return answered(content)
    except RequestError:
        raise _FailedError from None
