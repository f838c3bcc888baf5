"""Asks workers for the tokens of golden requests, and reports which models' tokens match.

A worker is asked from the start, beside its requests: no request waits for the answer or fails
because of it. It is asked again later, sooner if its tokens differ, and at once if it lost its
cache, since it may have been restarted with another template.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import aiohttp
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.checking.golden import GOLDEN, Golden, Told, verification
from extproc.checking.self_check import (
    DIFFERENT,
    NOT_ASKED,
    NOT_VERIFIED,
    OFF,
    VERIFICATIONS,
    VERIFIED,
    Verification,
)
from extproc.config import schema
from extproc.errors import RequestError
from extproc.requests.prompt import Prompt
from extproc.tokenizing.remote_tokenizer_wire import PATH, answered
from extproc.workers.polling import TIMEOUT_SECONDS, Client, Question
from extproc.workers.record import Table, Worker
from kvstate.feeds.backoff import Backoff
from kvstate.overlap import Tokens

log = logging.getLogger("kvsteer.tokens")

# When a worker is asked again: after an answer, after different tokens, and after no answer.
AGAIN_SECONDS = 300.0
AGAIN_WHILE_DIFFERENT_SECONDS = 10.0
RETRY_SECONDS = (1.0, 30.0)

# Asking one worker takes about 7 ms of CPU. So the first questions are spread over this time for
# each worker of the fleet, and later pauses take at least this long for each worker.
FIRST_SECONDS_A_WORKER = 0.02
AGAIN_SECONDS_A_WORKER = 0.7
AGAIN_WHILE_DIFFERENT_SECONDS_A_WORKER = 0.15

# Shortest time between questions, however often a worker loses its cache.
LEAST_SECONDS = 2.0

# The pause until the next try while a worker's model is unknown.
UNKNOWN_SECONDS = 1.0

# The limit for all golden requests of one worker; each one has `TIMEOUT_SECONDS`.
ALL_SECONDS = 30.0

# Far more than an answer to any golden request takes.
MAX_ANSWER_BYTES = 64 * 1024

# Workers that are asked at the same time.
AT_ONCE = 16

# How long KVSteer's own tokens are cached: templates may write the date.
OURS_SECONDS = 60.0

# Differences and failures of one model that are logged, until its tokens match again.
MAX_SAID = 8

_OK = 200
_NO_SUCH_PATH = (404, 405, 501)
_REFUSALS = (400, 413, 422)


class Encoder(Protocol):
    """KVSteer's tokenizer of a model."""

    def encode(self, prompt: Prompt) -> Tokens:
        """Returns the token ids of a prompt.

        Raises:
            RequestError: they are not certain.
        """

    def text_of(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids."""


class _SilentError(Exception):
    """A worker gave no answer for now; the message says why."""


class _NoTokenizeError(Exception):
    """A worker cannot tokenize; the message says why."""


class Verifying:
    """Compares the tokens of golden requests with those of every worker that serves a model.

    encoders: KVSteer's tokenizers, by model. model_of: returns the model that a worker serves, None
    while it is unknown. judge: receives the result for a worker. chance: returns 0 to 1, for
    jitter. monotonic: returns seconds.
    """

    def __init__(
        self,
        table: Table,
        models: Sequence[schema.Model],
        encoders: Mapping[str, Encoder],
        model_of: Callable[[Worker], str | None],
        judge: Callable[[Worker, Verification], None],
        chance: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._table = table
        self._models = models
        self._encoders = {
            model.name: encoders[model.name]
            for model in models
            if model.verify != schema.OFF and model.name in encoders
        }
        self._model_of = model_of
        self._judge = judge
        self._chance = chance
        self._monotonic = monotonic
        self._ours: dict[str, tuple[float, list[Tokens | str]]] = {}
        self._said: dict[str, set[tuple[object, ...]]] = {}
        self.question = Question("tokens", asyncio.Semaphore(AT_ONCE), AGAIN_SECONDS)

    @property
    def is_needed(self) -> bool:
        """Whether any model's tokens are compared."""
        return bool(self._encoders)

    def ask_now(self, worker: Worker) -> None:
        """Asks a worker at once, if it is asked at all: it may have changed."""
        poll = worker.polls.get(self.question.name)
        if poll is not None:
            poll.now()

    def expect(self, worker: Worker) -> None:
        """Marks the tokens of a worker that will be asked as not verified until it answers."""
        if worker.check.verification.result == OFF and self._model_of(worker) in self._encoders:
            self._judge(worker, NOT_ASKED)

    async def ask(self, client: Client, worker: Worker) -> float:
        """Asks a worker once; returns the seconds until it is asked again."""
        model, questioned, now = self._model_of(worker), worker.questioned, self._monotonic()
        if model is None:
            return UNKNOWN_SECONDS
        encoder = self._encoders.get(model)
        if encoder is None:
            self._take(worker, model, Verification())
            return AGAIN_SECONDS
        if now - questioned.at < LEAST_SECONDS:
            return LEAST_SECONDS - (now - questioned.at)
        questioned.at = now
        self.expect(worker)
        if questioned.retries is None:
            questioned.retries = Backoff(*RETRY_SECONDS, self._chance)
        try:
            async with asyncio.timeout(ALL_SECONDS):
                told = await self._compared(client, worker, model, encoder)
        except _NoTokenizeError as error:
            told = Verification(NOT_VERIFIED, str(error))
        except (_SilentError, TimeoutError) as error:
            self._note_silence(worker, str(error) or "it takes too long to answer")
            return max(LEAST_SECONDS, questioned.retries.next_seconds())
        questioned.retries.reset()
        self._take(worker, model, told)
        return self._pause_after(told)

    def first_seconds(self) -> float:
        """Returns the seconds until a worker is asked the first time."""
        return FIRST_SECONDS_A_WORKER * len(self._table) * self._chance()

    def _pause_after(self, told: Verification) -> float:
        least, a_worker = AGAIN_SECONDS, AGAIN_SECONDS_A_WORKER
        if told.result == DIFFERENT:
            least, a_worker = AGAIN_WHILE_DIFFERENT_SECONDS, AGAIN_WHILE_DIFFERENT_SECONDS_A_WORKER
        return max(least, a_worker * len(self._table)) * (0.9 + 0.2 * self._chance())

    async def _compared(
        self, client: Client, worker: Worker, model: str, encoder: Encoder
    ) -> Verification:
        """Returns the result of all golden requests; a new difference counts if found twice."""
        for _ in range(2):
            ours = await self._ours_of(model, encoder)
            theirs = await self._theirs(client, worker)
            told = [Told(*one) for one in zip(GOLDEN, ours, theirs, strict=True)]
            found = verification(told, encoder.text_of)
            if found.result != DIFFERENT or found == worker.check.verification:
                break
            self._ours.pop(model, None)  # the date that a template wrote may be outdated
        return found

    async def _ours_of(self, model: str, encoder: Encoder) -> list[Tokens | str]:
        now = self._monotonic()
        at, ours = self._ours.get(model, (now - OURS_SECONDS, []))
        if now - at >= OURS_SECONDS:
            ours = await asyncio.to_thread(lambda: [_encoded(encoder, one) for one in GOLDEN])
            self._ours[model] = now, ours
        return ours

    async def _theirs(self, client: Client, worker: Worker) -> list[Tokens | str]:
        """Returns a worker's answer to every golden request; equal questions are asked once.

        Raises:
            _SilentError, _NoTokenizeError: it does not answer at all.
        """
        told: dict[bytes, Tokens | str] = {}
        for golden in GOLDEN:
            question = golden.question(None)
            if question not in told:
                told[question] = await _asked(client, worker.endpoint, question)
        return [told[golden.question(None)] for golden in GOLDEN]

    def _note_silence(self, worker: Worker, why: str) -> None:
        """Updates why a worker is not verified; any other result remains while it is silent."""
        if worker.check.verification.result == NOT_VERIFIED:
            self._judge(worker, Verification(NOT_VERIFIED, why))

    def _take(self, worker: Worker, model: str, told: Verification) -> None:
        before = worker.check.verification
        if told != before and self._table.has(worker):
            self._judge(worker, told)
            self._say(worker, model, told)

    def _say(self, worker: Worker, model: str, told: Verification) -> None:
        """Logs each new result of a model once."""
        said = self._said.setdefault(model, set())
        if told.result == VERIFIED and self.of_models()[model].told.result == VERIFIED:
            if (VERIFIED,) not in said:
                log.info(
                    "model %s: its tokens match those of worker %s in %d golden requests",
                    *(model, worker.name, told.compared),
                )
            self._said[model] = {(VERIFIED,)}
            return
        key = (told.result, told.mismatch or told.why)
        if told.result in (VERIFIED, OFF) or key in said or len(said) >= MAX_SAID:
            return
        said.add(key)
        if told.result == DIFFERENT:
            log.warning(
                "model %s: its tokens differ from those of worker %s: %s; routed approximately"
                " until they match: %s",
                *(model, worker.name, told.why, ", ".join(told.shown()["forms"])),
            )
        else:
            log.info(
                "model %s: its tokens could not be compared with those of worker %s: %s;"
                " requests are still served",
                *(model, worker.name, told.why),
            )

    def of_models(self) -> dict[str, "OfModel"]:
        """Returns what is known about every model, by name, in one pass over the workers."""
        found = {model.name: OfModel(model.name in self._encoders) for model in self._models}
        for worker in self._table:
            model = found.get(self._model_of(worker) or "")
            if model is not None:
                told = worker.check.verification
                model.counts[told.result] += 1
                model.first.setdefault(told.result, (told, worker.name))
        return found

    def shown(self) -> list[dict[str, Any]]:
        """Returns the answer of GET /models."""
        return [
            {
                "model": name,
                **one.told.shown(),
                "worker": one.worker,
                "workers": {result: one.counts[result] for result in VERIFICATIONS},
            }
            for name, one in self.of_models().items()
        ]

    def note(self) -> str:
        """Returns what GET /readyz shows about models that are not verified, one line each."""
        lines = []
        for name, one in self.of_models().items():
            by = f" by worker {one.worker}: {one.told.why}" if one.worker else ""
            if one.told.result == DIFFERENT:
                lines.append(f"model {name}: its tokens are found to differ{by}")
            elif one.told.result == NOT_VERIFIED:
                lines.append(f"model {name}: its tokens are not verified{by}")
        return "\n".join(lines)


class OfModel:
    """What is known about a model's tokens.

    is_compared: whether they are compared at all. counts: the numbers of its workers, by result.
    first: for each result, the first verification that has it, and its worker.
    """

    def __init__(self, is_compared: bool) -> None:  # noqa: FBT001
        self._nobody = NOT_ASKED if is_compared else Verification()
        self.counts: Counter[str] = Counter()
        self.first: dict[str, tuple[Verification, str]] = {}

    @property
    def told(self) -> Verification:
        """The result that counts: a difference of any worker, else a match of any worker."""
        return self._counting[0]

    @property
    def worker(self) -> str:
        """The worker with that result, "" if there is none."""
        return self._counting[1]

    @property
    def _counting(self) -> tuple[Verification, str]:
        order = (DIFFERENT, VERIFIED, NOT_VERIFIED)
        return next((self.first[one] for one in order if one in self.first), (self._nobody, ""))


def _encoded(encoder: Encoder, golden: Golden) -> Tokens | str:
    try:
        return encoder.encode(golden.prompt)
    except RequestError as error:
        return error.reason


async def _asked(client: Client, endpoint: str, question: bytes) -> Tokens | str:
    """Returns the engine's tokens for one question, or why it refuses that one."""
    try:
        status, body = await client.post(
            endpoint, PATH, question, TIMEOUT_SECONDS, MAX_ANSWER_BYTES + 1
        )
    except TimeoutError:
        raise _SilentError(f"no answer to {PATH} within {TIMEOUT_SECONDS:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise _SilentError(f"{PATH}: {type(error).__name__}") from None
    if status in _NO_SUCH_PATH:
        raise _NoTokenizeError(f"it has no {PATH} (status {status})")
    if status in _REFUSALS:
        return f"{PATH}: status {status}"
    if status != _OK:
        raise _SilentError(f"{PATH}: status {status}")
    if len(body) > MAX_ANSWER_BYTES:
        raise _SilentError(f"{PATH}: an answer of more than {MAX_ANSWER_BYTES} bytes")
    try:
        return answered(body)
    except RequestError:
        raise _SilentError(f"{PATH}: an answer that cannot be read") from None


class VerifiedCollector(Collector):
    """Shows at every scrape which models' tokens are verified.

    of_models: `Verifying.of_models`.
    """

    def __init__(self, of_models: Callable[[], Mapping[str, OfModel]]) -> None:
        self._of_models = of_models

    def collect(self) -> Iterator[Metric]:
        """Yields the metric family, with a sample for each model and result."""
        family = GaugeMetricFamily(
            "kvsteer_model_verified",
            "1 for the result of comparing a model's tokens by golden requests",
            labels=["model", "result"],
        )
        for model, known in self._of_models().items():
            for result in VERIFICATIONS:
                family.add_metric([model, result], int(known.told.result == result))
        yield family
